import pytest

from jaxmem import chip_called
from llamem_course.first_run import run_for


@pytest.mark.parametrize(("chip", "layers"), [("v5e-1", 12), ("t4", 12), ("h100", 16)])
def test_a_device_gets_a_model_that_is_worth_it_and_what_is_wished_comes_first(chip, layers):
    config, settings = run_for(chip_called(chip), "auto", {"steps": 7, "seq_len": None})
    assert config.n_layers == layers and settings.steps == 7 and settings.seq_len >= 1024
    assert run_for(chip_called(chip), "tiny", {})[0].n_layers == 4
