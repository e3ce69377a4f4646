"""The training steps of MaxText and of Tunix as their own code makes them, asked about by this package.

`python benchmarks/peer_steps.py` writes peer_steps.md beside itself, in an environment of Python 3.12 that has both
(`pip install maxtext==0.2.5 google-tunix==0.1.7 qwix`) and this package's compilers. No line of theirs changes: what
remat and tiling they have are options of their own. Nothing runs but a tiny copy of each.
"""

import contextlib
import dataclasses
import datetime
import functools
import os
import platform
import tempfile
import textwrap
import time
from collections.abc import Callable, Iterator
from importlib import metadata
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import flax.linen.partitioning
import jax
import jax.numpy as jnp
import maxtext.configs.pyconfig  # pyrefly: ignore[missing-import]
import maxtext.trainers.pre_train.train  # pyrefly: ignore[missing-import]
import maxtext.trainers.pre_train.train_compile  # pyrefly: ignore[missing-import]
import maxtext.utils.maxtext_utils  # pyrefly: ignore[missing-import]
import maxtext.utils.model_creation_utils  # pyrefly: ignore[missing-import]
import maxtext.utils.sharding  # pyrefly: ignore[missing-import]
import numpy as np
import optax
import qwix  # pyrefly: ignore[missing-import]
import tunix.models.llama3.model as tunix_llama  # pyrefly: ignore[missing-import]
import tunix.sft.peft_trainer  # pyrefly: ignore[missing-import]
from compilers_used import compilers_used
from flax import nnx

import jaxmem

TABLE = Path(__file__).with_suffix(".md")
CHIPS = ("v5e-1", "t4", "h100")
# Llama 3.2 1B in MaxText's own words, and a tiny one.
WHOLE = {"base_emb_dim": 2048, "base_num_query_heads": 32, "base_num_kv_heads": 8, "base_mlp_dim": 8192}
WHOLE |= {"base_num_decoder_layers": 16, "head_dim": 64, "vocab_size": 128_256}
TINY = {"base_emb_dim": 64, "base_num_query_heads": 4, "base_num_kv_heads": 2, "base_mlp_dim": 192}
TINY |= {"base_num_decoder_layers": 5, "head_dim": 16, "vocab_size": 1000}


class MaxText:
    """Pretraining in bf16, as `train_compile` makes the step of it."""

    title, package, tokens, option = "Llama 3.2 1B, all trained", "maxtext", 8192, "remat_policy"

    def config(self, tokens: int, sizes: Any = None, **how: Any) -> Any:
        fixed = {"run_name": "x", "base_output_directory": tempfile.gettempdir(), "dataset_type": "synthetic"}
        fixed |= {"compile_topology": "v5e-1", "compile_topology_num_slices": 1, "per_device_batch_size": 1}
        fixed |= {"decoder_block": "llama2", "logits_via_embedding": True, "rope_max_timescale": 500_000}
        fixed |= {"mlp_activations": '["silu","linear"]', "enable_dropout": False, "enable_checkpointing": False}
        types = dict.fromkeys(("weight_dtype", "mu_dtype", "grad_dtype"), "float32" if sizes else "bfloat16")
        given = fixed | types | (sizes or WHOLE) | {"max_target_length": tokens} | how
        base = Path(maxtext.configs.pyconfig.__file__).with_name("base.yml")
        return maxtext.configs.pyconfig.initialize(["", str(base), *(f"{key}={given[key]}" for key in given)])

    @functools.cached_property
    def mesh(self) -> jax.sharding.Mesh:
        """One for all: the devices of two topologies are not the same."""
        return maxtext.trainers.pre_train.train_compile.get_topology_mesh(self.config(64))

    @contextlib.contextmanager
    def context(self) -> Iterator[None]:
        """What its steps are traced in."""
        config = self.config(64)
        with jax.set_mesh(self.mesh), flax.linen.partitioning.axis_rules(config.logical_axis_rules):
            yield

    def step(self, tokens: int, chip: str = "v5e-1", remat_policy: str = "minimal", num_vocab_tiling: int = 1) -> Any:
        """Return the step and its arguments."""
        # Splash attention is a TPU's.
        kernel = "flash" if chip.startswith("v") else "dot_product"
        config = self.config(tokens, attention=kernel, remat_policy=remat_policy, num_vocab_tiling=num_vocab_tiling)
        make_inputs = maxtext.trainers.pre_train.train_compile.get_shaped_inputs
        args, _, state_shardings, _, model = make_inputs(self.mesh, config)
        sharding = maxtext.utils.sharding
        params_shardings, state_shardings = sharding.maybe_update_params_sharding_with_opt(config, state_shardings)
        inputs = sharding.build_zero1_input_state_mesh_shardings(config, state_shardings, params_shardings)
        data = sharding.get_input_data_sharding(config, self.mesh)
        train_step = maxtext.trainers.pre_train.train.train_step
        make = maxtext.utils.maxtext_utils.get_functional_train_with_signature
        step, *_ = make(train_step, data, inputs, model, config, params_shardings)
        return step, *args

    donated, ways = (0,), {"tokens": [32_768], "remat_policy": ["minimal", "full"], "num_vocab_tiling": [1, 8]}

    def verify(self) -> Any:
        configs = {how: self.config(64, TINY, attention="dot_product", remat_policy=how) for how in ("minimal", "full")}
        devices = maxtext.utils.maxtext_utils.create_device_mesh(configs["full"], jax.devices()[:1])
        mesh = jax.sharding.Mesh(devices, configs["full"].mesh_axes)
        with jax.set_mesh(mesh), flax.linen.partitioning.axis_rules(configs["full"].logical_axis_rules):
            create = maxtext.utils.model_creation_utils.create_nnx_abstract_model
            models = {how: create(config, mesh)[0]() for how, config in configs.items()}
            graphs = {how: nnx.graphdef(model) for how, model in models.items()}
            _, params, rest = nnx.split(models["full"], nnx.Param, ...)
            tokens = jax.random.randint(jax.random.key(0), (1, 64), 0, 1000)
            names = ("inputs", "targets", "inputs_position", "inputs_segmentation", "targets_segmentation")
            batch = dict.fromkeys(names, jnp.ones_like(tokens)) | {"inputs": tokens, "targets": tokens[:, ::-1]}
            batch["inputs_position"] = jnp.arange(64)[None]

            def loss_fn(params: Any, batch: Any, how: str) -> Any:
                model = nnx.merge(graphs[how], params, rest)
                return maxtext.trainers.pre_train.train.loss_fn(model, configs[how], dict(batch), None, None)[0]

            return jaxmem.verify_remat(loss_fn, params, batch, remat="full", baseline="minimal")

    def wrong(self) -> Any:
        """Ask a GPU for the step with a TPU's attention."""
        jaxmem.compile_report(*self.step(2048), donate_argnums=self.donated, chip="h100")


class Tunix:
    """Adapters of rank 16 over a bf16 base, by the trainer's own step."""

    title, package, tokens, option = "Llama 3.2 1B, adapters", "google-tunix", 4096, "remat_config"

    def model(self, remat_config: str, **sizes: Any) -> Any:
        sizes["remat_config"] = tunix_llama.RematConfig[remat_config]
        config = dataclasses.replace(tunix_llama.ModelConfig.llama3p2_1b(), **sizes)
        model = tunix_llama.Llama3(config, rngs=nnx.Rngs(0))
        provider = qwix.LoraProvider(module_path=".*_proj", rank=16, alpha=16.0)
        return qwix.apply_lora_to_model(model, provider, **model.get_model_input())

    def loss(self, model: Any, tokens_BT: Any) -> Any:
        length = tokens_BT.shape[1]
        positions, mask = jnp.arange(length)[None], jnp.tril(jnp.ones((1, length, length), bool))
        ones = jnp.ones_like(tokens_BT, bool)
        return tunix.sft.peft_trainer._default_loss_fn(model, tokens_BT, ones, positions, mask)

    def step(self, tokens: int, chip: str = "v5e-1", remat_config: str = "NONE") -> Any:
        del chip

        def build() -> Any:
            model = self.model(remat_config)
            return model, nnx.Optimizer(model, optax.adamw(1e-4), wrt=nnx.LoRAParam)

        model, optimizer = nnx.eval_shape(build)
        for part in (model, optimizer):
            nnx.update(part, jax.tree.map(in_bf16, nnx.state(part)))
        itself = SimpleNamespace(
            gen_model_input_fn=lambda tokens_BT: {"tokens_BT": tokens_BT},
            loss_fn=self.loss,
            _lora_enabled=True,
            _has_aux=False,
        )
        train_step = tunix.sft.peft_trainer.PeftTrainer._train_step.__get__(itself)
        return train_step, model, optimizer, jax.ShapeDtypeStruct((1, tokens), jnp.int32)

    context = staticmethod(contextlib.nullcontext)
    donated, ways = (0, 1), {"tokens": [8192, 4096], "remat_config": ["NONE", "BLOCK", "DECODER"]}

    def verify(self) -> Any:
        sizes = {"num_layers": 5, "vocab_size": 1000, "embed_dim": 64, "hidden_dim": 192, "num_heads": 4}
        sizes |= {"head_dim": 16, "num_kv_heads": 2}
        models = {how: self.model(how, **sizes) for how in ("NONE", "DECODER")}
        graphs = {how: nnx.graphdef(model) for how, model in models.items()}
        _, params, rest = nnx.split(models["DECODER"], nnx.LoRAParam, ...)
        # Adapters begin at zero on one side, where half of the gradients are zero.
        draws = np.random.default_rng(0)
        params = jax.tree.map(lambda leaf: leaf + 0.1 * draws.normal(size=leaf.shape).astype(leaf.dtype), params)
        tokens_BT = jax.random.randint(jax.random.key(0), (1, 64), 0, 1000)

        def loss_fn(params: Any, batch: Any, how: str) -> Any:
            frozen, tokens_BT = batch
            return self.loss(nnx.merge(graphs[how], params, frozen), tokens_BT)

        return jaxmem.verify_remat(loss_fn, params, (rest, tokens_BT), remat="DECODER", baseline="NONE")

    def wrong(self) -> Any:
        """Hand over the optimizer alone, with the model closed over."""
        step, model, *rest = self.step(128)
        jaxmem.compile_report(lambda *rest: step(model, *rest), *rest, chip="v5e-1")


def in_bf16(leaf: Any) -> Any:
    floating = jnp.issubdtype(leaf.dtype, jnp.floating)
    return jax.ShapeDtypeStruct(leaf.shape, jnp.bfloat16 if floating else leaf.dtype)


def peak_and_seconds(case: Any, chip: str, **how: Any) -> str:
    """Return the peak of a step in GiB, by the chip's compiler, and the seconds to that answer."""
    start = time.perf_counter()
    report = jaxmem.compile_report(*case.step(case.tokens, chip, **how), donate_argnums=case.donated, chip=chip)
    return f"{report.peak_bytes / 2**30:.2f} ({time.perf_counter() - start:.0f} s)"


def fitting(case: Any) -> str:
    """Return the first of its own ways that fits a v5e, its peak, and how many were asked for."""
    found = jaxmem.find_fitting(jaxmem.options(case.step, **case.ways), "v5e-1", donate_argnums=case.donated)
    return f"{found.name}: {found.report.peak_bytes / 2**30:.2f}, {len(found.answers)} asked"


def refusal(wrong: Callable[[], Any]) -> str:
    try:
        wrong()
    except Exception as error:
        return f"{wrong.__doc__} `{type(error).__name__}: {textwrap.shorten(str(error), 140, placeholder=' ...')}`"
    return f"{wrong.__doc__} Not refused."


def row(case: Any) -> str:
    """Return one line of the table."""
    best = {"MaxText": "full", "Tunix": "DECODER"}[type(case).__name__]
    peaks = [
        f"{peak_and_seconds(case, chip)} → {peak_and_seconds(case, chip, **{case.option: best})}" for chip in CHIPS
    ]
    verification = case.verify()
    verdict = "holds" if verification.holds else " ".join(str(verification.failed[0]).split())
    title = f"{type(case).__name__} {metadata.version(case.package)}: {case.title}, {case.tokens:,} tokens"
    return f"| {' | '.join([title, '0', *peaks, verdict, fitting(case), refusal(case.wrong)])} |"


HEADER = """# The peers' own steps

{today}, {versions},
by `benchmarks/peer_steps.py`: training steps as MaxText and Tunix make them, none of their lines changed; their option
for remat at its default ("minimal", NONE) → at its thriftiest ("full", DECODER). Attention is Splash's in MaxText on a
TPU, whole scores everywhere else. Peaks in GiB by the chips' compilers, in brackets seconds to the answer on one CPU
core, nothing kept; nothing ran on a chip. `verify_remat` is of a tiny copy in f32: MaxText's layers are checkpointed
whatever its option says, so that there is nothing to compare with. `find_fitting` chooses among their own options for a
v5e.

| step | lines | v5e-1 | t4 | h100 | `verify_remat` | `find_fitting` | a wrong way, and its error |
|---|---|---|---|---|---|---|---|
"""


def main() -> None:
    """Write the table."""
    versions = ", ".join(f"{name} {metadata.version(name)}" for name in ("flax", "qwix"))
    versions += f", {compilers_used('tpu', 'cuda')}, Python {platform.python_version()}"
    with tempfile.TemporaryDirectory() as nothing_kept:
        os.environ["LLAMEM_CACHE"] = nothing_kept
        rows = []
        for case in (MaxText(), Tunix()):
            with case.context():
                rows.append(row(case))
    TABLE.write_text(HEADER.format(today=datetime.date.today(), versions=versions) + "\n".join(rows) + "\n")


if __name__ == "__main__":
    main()
