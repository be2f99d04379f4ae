"""The folder of what outlives the process."""

from __future__ import annotations

from pathlib import Path

import pytest

from inferd.config import StateConfig
from inferd.errors import ConfigError
from inferd.state.folder import data_folder, make_folder


def test_a_folder_is_made_for_this_user_alone_and_one_that_is_there_is_left_as_it_is(tmp_path: Path) -> None:
    folder = tmp_path / "new" / "below"
    assert make_folder(folder) == folder
    assert folder.is_dir()
    assert folder.stat().st_mode & 0o777 == 0o700
    (folder / "file").write_text("kept")
    folder.chmod(0o750)
    make_folder(folder)
    assert (folder / "file").read_text() == "kept"
    assert folder.stat().st_mode & 0o777 == 0o750


def test_a_folder_that_cannot_be_made_is_refused_with_the_setting(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match="cannot be created") as caught:
        make_folder(tmp_path / "file" / "below")
    assert caught.value.param == "state.data_dir"


@pytest.mark.skipif("sys.platform == 'darwin'", reason="macOS has a folder of its own")
def test_the_folder_is_the_one_that_is_set_or_the_users_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("HOME", str(tmp_path))
    monkeypatch.delenv("XDG_DATA_HOME", raising=False)
    assert data_folder(StateConfig()) == tmp_path / ".local" / "share" / "inferd"
    monkeypatch.setenv("XDG_DATA_HOME", str(tmp_path / "data"))
    assert data_folder(StateConfig()) == tmp_path / "data" / "inferd"
    assert data_folder(StateConfig(data_dir=str(tmp_path / "mine"))) == tmp_path / "mine"
