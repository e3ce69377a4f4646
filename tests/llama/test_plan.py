import json

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


PLANS = [
    Plan(),
    Plan(remat=None, loss_tiles=None, mode="unroll"),
    Plan(remat=Policy(save=("attn_out", "q"), offload=("block_in",)), mesh={"fsdp": 4, "context": 2}),
    Plan(remat=Policy(save_all_but=("gate",)), loss_tiles=7, loss_axis="vocab", attention="tiled"),
    Plan(mode="nested", weights="host", moments="host", update="in_backward", offload=("block_in",), mlp_tiles=16),
]


@pytest.mark.parametrize("plan", PLANS, ids=repr)
def test_a_plan_comes_back_from_its_file_as_it_was(plan, tmp_path):
    file = plan.save(tmp_path / "plan.json", chip="v5e-8")
    assert Plan.load(file) == plan and repr(Plan.load(file)) == repr(plan)
    assert json.loads(file.read_text())["chip"] == "v5e-8"
    assert Plan.load(Plan().save(file)) == Plan(), "a plan may be written over a plan"


@pytest.mark.parametrize(
    ("text", "says"),
    [
        ("{", "holds no JSON object"),
        ("[1]", "holds no JSON object, but list"),
        ('{"mesh": {}}', 'is no plan: it has no "plan" with fields'),
        ('{"plan": {"remat": "attn", "tiles": 4}}', r"is no plan: no field is called \['tiles'\]"),
        ('{"plan": {"mesh": {"model": 2}}}', "no mesh axis is called 'model'"),
        ('{"plan": {"remat": {"save": "attn"}}}', "expected a tuple of names"),
        ('{"plan": {"remat": {"keep": ["attn"]}}}', "keep"),
        ('{"plan": {"head_groups": "4"}}', "head_groups='4'"),
        ('{"plan": {"weights": "host", "mode": "unroll"}}', "one of them at hand at a time"),
    ],
)
def test_what_is_no_plan_is_refused_by_the_file_s_name_and_stays(text, says, tmp_path, as_a_user):
    file = tmp_path / "mine.json"
    file.write_text(text)
    with pytest.raises(ValueError, match=rf"mine\.json.*{says}"):
        Plan.load(file)
    if '"plan"' not in text:
        with pytest.raises(FileExistsError, match=r"mine\.json exists and is no plan: nothing was written"):
            Plan().save(file)
    assert file.read_text() == text
