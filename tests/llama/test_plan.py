import pytest

from llamem import Plan, Policy


@pytest.mark.parametrize(
    ("wrong", "says"),
    [
        ({"remat": "nothin"}, "no remat policy is called 'nothin'"),
        ({"mode": "scam"}, "mode='scam'"),
        ({"update": "before"}, "update='before'"),
        ({"loss_tiles": 0}, "loss_tiles=0"),
        ({"loss_tiles": None, "loss_axis": "vocab"}, "no tiles to cut"),
        ({"head_groups": 0}, "head_groups=0"),
        ({"offload": "block_in"}, "offload='block_in'"),
        ({"offload": ("blok_in",)}, r"no layer names \['blok_in'\]"),
        ({"moments": "host", "mesh": {"fsdp": 2}}, "'fsdp' axis instead"),
        ({"update": "in_backward", "mesh": {"data": 2}}, "'fsdp' axis instead"),
        ({"mesh": {"model": 2}}, "no mesh axis is called 'model'. Known: data, fsdp, tensor, context"),
        ({"mesh": "fsdp"}, "mesh='fsdp': expected axes and their sizes"),
        ({"mesh": {"fsdp": 0}}, "mesh size fsdp=0: expected a whole number"),
        ({"mesh": {"tensor": 2}, "loss_axis": "tokens"}, "vocabulary split over 'tensor'"),
        ({"mesh": {"context": 2}, "attention": "cudnn"}, "cuDNN computes whole sequences"),
        ({"weights": "host", "mode": "unroll"}, "one of them at hand at a time"),
        ({"weights": "host", "remat": None}, "whatever else is kept would hold weights"),
        ({"update": "in_backward", "offload": ("block_in", "attn_out")}, "Choose remat='nothing'"),
        ({"offload": ("block_in",), "remat": None}, "cannot be added to remat=None"),
        ({"head_groups": 2, "remat": "qkv_attn"}, "attn', 'k', 'q', 'v'"),
        ({"mlp_tiles": 2, "remat": Policy(save=("gate",))}, "mlp_tiles=1"),
    ],
)
def test_what_cannot_be_meant_is_refused_when_the_plan_is_made(wrong, says, as_a_user):
    with pytest.raises((ValueError, TypeError), match=says):
        Plan(**wrong)


def test_what_is_offloaded_comes_on_top_of_what_remat_says():
    assert Plan().policy == "nothing" and Plan(remat=None).policy is None
    assert Plan(offload=("block_in",)).policy == Policy(offload=("block_in",))
    assert Plan(remat="attn", offload=("block_in",)).policy == Policy(save=("attn",), offload=("block_in",))
    twice = Plan(remat="offload_block_in", offload=("attn_out", "block_in"))
    assert twice.policy == Policy(offload=("block_in", "attn_out")) and twice.offload == ("attn_out", "block_in")


def test_a_plan_that_goes_layer_by_layer_keeps_their_inputs():
    assert not Plan(moments="host").layer_by_layer
    for plan in (Plan(weights="host"), Plan(update="in_backward"), Plan(weights="host", remat="nothing_saveable")):
        assert plan.layer_by_layer
    kept = [Plan(weights="host"), Plan(weights="host", remat="offload_block_in")]
    kept += [Plan(weights="host", remat=Policy(offload=("block_in",))), Plan(weights="host", offload=("block_in",))]
    assert [plan.inputs_on_host for plan in kept] == [False, True, True, True]
