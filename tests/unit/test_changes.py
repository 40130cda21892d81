"""What has changed between a checkpoint's config and a run's, whatever version wrote the checkpoint."""

from copy import deepcopy

import pytest
from composed import compose_tree

from memtrain.engine.resume import changes, check_changes
from memtrain.errors import UserError


def test_keys_that_an_older_version_did_not_have_are_at_their_defaults() -> None:
    new = compose_tree("debug=tiny")
    old = deepcopy(new)
    del old["adapter"], old["export"], old["model"]["qk_norm"], old["model"]["rope_scaling"]
    assert changes(old, new) == []
    now = compose_tree("debug=tiny", "model.qk_norm=true")
    found = changes(old, now)
    assert found == [("model.qk_norm", False, True)]
    with pytest.raises(UserError, match=r"^model\.qk_norm=True"):
        check_changes(found, old, now)


def test_what_only_one_knows_is_none_in_the_other() -> None:
    assert changes({"steps": 2, "gone": 1}, {"steps": 3}) == [("steps", 2, 3), ("gone", 1, None)]
