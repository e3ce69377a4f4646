"""What `mesh_cases.py` saw on eight simulated devices: values, and what the compiled programs do and send."""

from pathlib import Path

import pytest
from children import answer_of

from llamem import LlamaConfig, Plan, TrainSettings, abstract_step

CASES = Path(__file__).parent / "mesh_cases.py"


@pytest.fixture(scope="module")
def seen():
    return answer_of(CASES, "quick")


@pytest.fixture(scope="module")
def others():
    return answer_of(CASES, "others")


def check_gradients(errors, where):
    wrong = {name: error for name, error in errors.items() if not error < 1e-5}
    assert not wrong and len(errors) >= 12, (where, wrong)


def check(cases, layers):
    """Loss and gradients, each device's share of the products, and how often devices meet."""
    for case in cases:
        assert case["loss error"] < 1e-6, case
        check_gradients(case["gradient errors"], case["name"])
        assert 0.95 < case["products of share"] < 1.05, case
        # Once per step, per layer or per part of the batch; a tile of tokens, columns or attention meets nobody.
        parts = case["accumulate"]
        allowed = {1, parts, parts * layers}
        assert max(case["loop trips"]) >= layers, case  # a loop is there to be seen: unrolled layers leave the tiles'
        wrong = {kind: runs for kind, runs in case["message runs"].items() if not set(runs) <= allowed}
        assert not wrong, (case["name"], wrong)


def test_every_mesh_has_the_float64_gradients_its_shares_of_products_and_no_message_from_a_tile(seen):
    check(seen["cases"], seen["layers"])


def test_fsdp_gathers_every_weight_at_most_twice(seen):
    (case,), layers = [case for case in seen["cases"] if case["name"] == "FSDP"], seen["layers"]
    gathers, scatters = (sum(case["message runs"].get(kind, [0])) for kind in ("all-gather", "reduce-scatter"))
    # 7 matrices per layer, forward and backward; the head once; everybody's token ids once.
    assert 7 * layers < gathers <= 2 * 7 * layers + 2
    # Their gradients and the head's; the embedding's come back by an all-to-all.
    assert scatters <= 7 * layers + 1


def test_along_the_sides_of_a_slice_gradients_are_scattered_one_side_after_the_other(seen):
    by_name, layers = {case["name"]: case for case in seen["cases"]}, seen["layers"]
    scatters = {name: sum(case["message runs"].get("reduce-scatter", [0])) for name, case in by_name.items()}
    assert scatters["FSDP"] == 7 * layers + 1  # the matrices' and the head's
    assert scatters["FSDP 2 x 4"] == 2 * scatters["FSDP"] and scatters["FSDP 2 x 2 x 2"] == 3 * scatters["FSDP"]
    # Small weights are gathered in as many stages; along one side none is.
    gathers = {name: sum(case["message runs"].get("all-gather", [0])) for name, case in by_name.items()}
    assert gathers["FSDP 2 x 4"] > 1.9 * (gathers["FSDP"] - 1)


def test_bf16_weights_are_rounded_on_a_mesh_as_on_one_device(seen):
    assert seen["rounding"]["mesh"] < 1e-3 < 0.1 < seen["rounding"]["nearest"]


def test_gradients_taken_outside_of_the_mesh_are_right_too(seen):
    check_gradients(seen["outside"], "outside")


def test_tiled_attention_over_shared_sequences_computes_what_is_seen(seen):
    check_attention(seen["tiled"])
    assert 0.95 < seen["tiled products of share"] < 1.05


@pytest.mark.slow
@pytest.mark.weekly
def test_other_meshes_ways_to_rematerialise_and_splash(others):
    check(others["cases"], others["layers"])
    check_attention(others["splash"])


@pytest.mark.slow
@pytest.mark.weekly
def test_a_run_goes_on_on_another_mesh_and_its_model_writes_the_same_text(others):
    one, two = others["run"]["losses"]["one device"], others["run"]["losses"]["two meshes"]
    assert len(one) == len(two) == 4
    for (*values, validation), (*expected, other) in zip(one, two, strict=True):
        # The norm of all gradients is ten times what is let through, so a wrong one would show in the next loss.
        assert values == pytest.approx(expected, rel=1e-5)
        assert validation == other or validation == pytest.approx(other, rel=1e-5)
    assert others["run"]["texts"][0] == others["run"]["texts"][1]
    assert others["run"]["held"] == 1 / 4


@pytest.mark.parametrize(
    ("settings", "mesh", "says"),
    [
        ({"batch_size": 6}, {"data": 2, "fsdp": 2}, "batch_size=6 does not divide among data=2 x fsdp=2"),
        ({"batch_size": 8, "accumulate": 4}, {"fsdp": 4}, "in accumulate=4 parts: choose a multiple of 16"),
        ({"seq_len": 510}, {"context": 2}, "seq_len=510 does not divide among context=2"),
    ],
)
def test_batches_that_cannot_be_shared_out_are_refused(settings, mesh, says):
    config = LlamaConfig.from_name("tiny")
    with pytest.raises(ValueError, match=says):
        abstract_step(config, TrainSettings(**settings), Plan(mesh=mesh))


def check_attention(errors):
    assert max(errors) < 1e-5 and len(errors) == 4  # the value's, and those of the gradients of q, k and v
