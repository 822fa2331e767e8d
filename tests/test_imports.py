"""What starting a recipe imports."""

from harness import FINETUNE, run_python

SHOW = """
import sys
sys.path.insert(0, "scripts")
from pathlib import Path
import launch, torch
compile_ = torch.compile
recipe = launch._load(Path(sys.argv[1]))
print("bitsandbytes" in sys.modules, "torch._inductor.compile_fx" in sys.modules, torch.compile is compile_)
"""


def test_a_recipe_starts_without_torchs_compiler_which_bitsandbytes_would_load(tmp_path):
    (tmp_path / "show.py").write_text(SHOW)
    done = run_python(tmp_path / "show.py", FINETUNE)
    assert done.stdout.split() == ["True", "False", "True"], done.stderr[-2000:]
