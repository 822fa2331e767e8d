"""Which checkpoint counts: manifests, damage of each kind, the newest good one, what is removed and what never is."""

import json

import pytest

from slipway import manifest


def save(output, step, run_id="a", **files):
    """A sealed checkpoint of small files."""
    folder = output / f"checkpoint-{step}"
    (folder / "global_step").mkdir(parents=True)
    contents = {
        "model.safetensors": b"weights" * 100,
        "global_step/rank_0.pt": b"0" * 50,
        "global_step/rank_1.pt": b"1",
    }
    for name, content in contents.items():
        (folder / name).write_bytes(content + str(step).encode())
    names = manifest.listing(folder)
    return manifest.seal(folder, {"run_id": run_id, "asked": {}}, manifest.digest(folder, names, to_disk=True))


def flip(path):
    content = bytearray(path.read_bytes())
    content[len(content) // 2] ^= 1
    path.write_bytes(bytes(content))


def truncate(path):
    path.write_bytes(path.read_bytes()[:-1])


DAMAGE = {
    "no manifest": lambda folder: (folder / "manifest.json").unlink(),
    "manifest cannot be read": lambda folder: truncate(folder / "manifest.json"),
    "model.safetensors has 701 bytes, its manifest says 702": lambda folder: truncate(folder / "model.safetensors"),
    "model.safetensors is not what was saved": lambda folder: flip(folder / "model.safetensors"),
    "global_step/rank_1.pt is missing": lambda folder: (folder / "global_step/rank_1.pt").unlink(),
    "of step 9": lambda folder: (folder / "manifest.json").write_text(
        (folder / "manifest.json").read_text().replace('"step": 10', '"step": 9')
    ),
}


@pytest.mark.parametrize("why", DAMAGE)
def test_a_damaged_checkpoint_is_passed_over_with_the_reason_and_stays(why, tmp_path):
    for step in (5, 9, 10):
        save(tmp_path, step)
    DAMAGE[why](tmp_path / "checkpoint-10")
    left = sorted(tmp_path.rglob("*"))
    found, lines = manifest.newest(tmp_path)
    assert found.step == 9  # by number: as names 9 would come after 10
    (line,) = lines
    assert line.startswith("checkpoint-10 is passed over: ") and why in line
    assert sorted(tmp_path.rglob("*")) == left


def test_none_is_found_where_none_is_good(tmp_path):
    assert manifest.newest(tmp_path / "nowhere") == (None, [])
    save(tmp_path, 3)
    flip(tmp_path / "checkpoint-3/global_step/rank_0.pt")
    found, lines = manifest.newest(tmp_path)
    assert found is None and len(lines) == 1
    assert manifest.newest(tmp_path, checksums=False)[0].step == 3, "sizes alone do not show a flipped byte"


def test_a_checkpoint_of_a_run_that_was_overwritten_is_not_gone_on_from(tmp_path):
    save(tmp_path, 5, run_id="now")
    save(tmp_path, 20, run_id="before")
    found, lines = manifest.newest(tmp_path, "now")
    assert found.step == 5
    assert "an earlier run's" in lines[0]


def test_rotation_keeps_the_newest_complete_ones_and_what_is_newer(tmp_path):
    for step in (5, 10, 15, 20, 25):
        save(tmp_path, step)
    (tmp_path / "checkpoint-25/manifest.json").unlink()
    manifest.set_aside(tmp_path / "checkpoint-5")
    manifest.rotate(tmp_path, 2)
    assert {path.name for path in tmp_path.iterdir()} == {"checkpoint-15", "checkpoint-20", "checkpoint-25"}


@pytest.mark.parametrize("keep", [1, 2, 3, None])
def test_rotation_never_removes_the_only_good_one(keep, tmp_path):
    for step in (5, 10, 15):
        save(tmp_path, step)
    truncate(tmp_path / "checkpoint-10/model.safetensors")
    (tmp_path / "checkpoint-15/manifest.json").unlink()
    manifest.rotate(tmp_path, keep)
    assert manifest.newest(tmp_path)[0].step == 5


def test_what_was_half_saved_is_not_written_into(tmp_path):
    save(tmp_path, 5)
    for name in ("checkpoint-5.incomplete", "checkpoint-5.incomplete-2"):
        manifest.set_aside(tmp_path / "checkpoint-5")
        assert (tmp_path / name / "manifest.json").is_file()
        assert manifest.folders(tmp_path) == []
        save(tmp_path, 5)
    manifest.set_aside(tmp_path / "checkpoint-7")  # not there: nothing to do


def test_the_manifest_names_every_file_and_comes_last(tmp_path):
    sealed = save(tmp_path, 5)
    content = json.loads((sealed.path / "manifest.json").read_text())
    assert set(content["files"]) == {"model.safetensors", "global_step/rank_0.pt", "global_step/rank_1.pt"}
    assert manifest.read(sealed.path) == sealed
    times = {path.name: path.stat().st_mtime_ns for path in sealed.path.rglob("*") if path.is_file()}
    assert max(times, key=times.get) == "manifest.json"
