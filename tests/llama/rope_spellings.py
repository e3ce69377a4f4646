"""Where a `config.json` says RoPE's angles: `(fields beside the architecture's, theta and factor)`, or how refused."""

from llamem import PRESETS
from llamem.files import config_to_hf

NO_ROPE = {k: v for k, v in config_to_hf(PRESETS["llama3.2-1b"]).items() if not k.startswith("rope")}
BANDS = {"low_freq_factor": 1.0, "high_freq_factor": 4.0, "original_max_position_embeddings": 8192}
SCALED = {"rope_type": "llama3", "factor": 32.0, **BANDS}
THETA = {"rope_theta": 5e5}

READ = {
    "at the top": (THETA | {"rope_scaling": SCALED}, (5e5, 32.0)),
    "all in rope_parameters": ({"rope_parameters": THETA | SCALED}, (5e5, 32.0)),
    "all in rope_scaling": ({"rope_scaling": THETA | SCALED}, (5e5, 32.0)),
    "said twice": (THETA | {"rope_parameters": THETA | SCALED, "rope_scaling": THETA | SCALED}, (5e5, 32.0)),
    "by its old name": ({"rope_parameters": THETA | {"type": "default", "partial_rotary_factor": 1.0}}, (5e5, None)),
    "nothing, as Llama 1": ({}, (1e4, None)),
    "null": (THETA | {"rope_scaling": None, "rope_parameters": None}, (5e5, None)),
}
REFUSED = {
    "two thetas": ({"rope_theta": 1e4, "rope_parameters": THETA | SCALED}, "rope_theta in config.json is 10000.0 at"),
    "two objects": ({"rope_scaling": SCALED, "rope_parameters": THETA | SCALED}, "rope_scaling=.* differ: leave one"),
    "two kinds": ({"rope_scaling": THETA | SCALED | {"type": "default"}}, "rope_type='llama3', type='default'"),
    "no kind": ({"rope_scaling": {"rope_type": ["llama3"]}}, r"rope_type=\['llama3'\]"),
    "no theta": ({"rope_scaling": SCALED}, "no rope_theta beside rope_type='llama3'.*500000.0 for Llama 3"),
    "by kinds of layers": (
        {"rope_parameters": {"full_attention": THETA | SCALED}},
        "full_attention in rope_parameters",
    ),
    "an unknown key": (
        THETA | {"rope_scaling": SCALED | {"beta": 1}},
        "beta in rope_scaling of config.json: not known",
    ),
    "a factor of no kind": (THETA | {"rope_parameters": {"rope_type": "default", "factor": 8.0}}, "factor in rope_par"),
    "half the channels": ({"rope_parameters": THETA | {"partial_rotary_factor": 0.5}}, "partial_rotary_factor=0.5"),
    "half, at the top": (THETA | {"partial_rotary_factor": 0.5}, "partial_rotary_factor=0.5"),
    "two contexts": (
        THETA | {"rope_scaling": SCALED, "original_max_position_embeddings": 4096},
        "original_max_position_embeddings in config.json is 4096 at the top and 8192",
    ),
}
