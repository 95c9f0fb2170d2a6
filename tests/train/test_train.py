"""The settings that the stage `train` gives to the training loop."""

from dataclasses import MISSING, fields
from pathlib import Path

import pytest

from tasks.config.cluster import load_cluster
from tasks.config.params import load_params
from tasks.train.driver import make_settings
from training.trainer.settings import Settings

PROJECT = Path(__file__).resolve().parents[2]
NAMES = {field.name for field in fields(Settings)}


def test_settings_have_no_defaults():
    filled = [f.name for f in fields(Settings) if (f.default, f.default_factory) != (MISSING, MISSING)]
    assert filled == []


@pytest.mark.parametrize("section", ["train", "actor_train"])
def test_every_parameter_becomes_a_setting_and_a_renamed_one_fails(section):
    params, cluster = load_params(PROJECT / "params.yaml"), load_cluster(PROJECT)
    whole = params if section == "train" else cluster
    part = getattr(whole, section)
    settings = make_settings(params, cluster, Path("model"), Path("folder"), {})
    for name in NAMES & type(part).model_fields.keys():
        assert getattr(settings, name) == part.model_dump()[name], name
        without = part.model_copy()
        del without.__dict__[name]
        whole.__dict__[section] = without
        with pytest.raises(AttributeError, match=name):
            make_settings(params, cluster, Path("model"), Path("folder"), {})
