"""What may import what: yggrt stands alone, and answers with nothing but its own dependencies."""

from __future__ import annotations

import ast
import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
ALLOWED = {"torch", "numpy", "msgpack", "safetensors", "tokenizers", "jinja2", "yggrt"}
FORBIDDEN_MODULES = ("transformers", "networkx", "onnx", "torch._inductor", "torch._dynamo", "yggc", "gguf")


def imported_packages(path: Path) -> set[str]:
    names = set()
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            names |= {alias.name for alias in node.names}
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{path}: relative import"
            names.add(str(node.module))
    return {name.split(".")[0] for name in names}


def test_the_runtime_imports_only_what_it_declares():
    for path in (ROOT / "runtime/yggrt").glob("*.py"):
        foreign = imported_packages(path) - ALLOWED - set(sys.stdlib_module_names)
        assert not foreign, f"{path.name} imports {foreign}"


@pytest.mark.field(19)
def test_running_a_bundle_loads_no_compiler_and_starts_no_process(toy_bundle, tmp_path):
    """In an empty environment, with exec forbidden by an audit hook."""
    program = f"""
import sys
def refuse(event, _arguments):
    if event in ("subprocess.Popen", "os.system", "os.exec", "os.posix_spawn", "os.spawn", "os.fork"):
        raise SystemExit(f"started a process: {{event}}")
sys.addaudithook(refuse)
import pytest

from yggrt.cli import main
code = main(["run", {str(toy_bundle.path)!r}, "the world tree", "--max-new-tokens", "8"])
loaded = [name for name in {FORBIDDEN_MODULES!r} if name in sys.modules]
assert not loaded, loaded
sys.exit(code)
"""
    environment = {"PATH": "/nonexistent", "PYTHONPATH": str(ROOT / "runtime"), "HOME": str(tmp_path)}
    found = subprocess.run(
        [sys.executable, "-c", program], env=environment, capture_output=True, text=True, cwd=tmp_path, check=False
    )
    assert found.returncode == 0, found.stderr
    assert "tokens/s" in found.stderr


def test_a_copied_and_renamed_bundle_still_answers_with_yggrt_alone(toy_bundle, tmp_path):
    """yggrt from its own folder, where no yggc can be imported."""
    import shutil

    shutil.copytree(toy_bundle.path, tmp_path / "elsewhere")
    os.symlink(ROOT / "runtime/yggrt", tmp_path / "yggrt")
    program = "import sys; sys.modules['yggc'] = None; from yggrt.cli import main; sys.exit(main())"
    command = [sys.executable, "-c", program, "run", str(tmp_path / "elsewhere"), "the world", "--max-new-tokens", "4"]
    found = subprocess.run(command, capture_output=True, text=True, cwd=tmp_path, check=False)
    assert found.returncode == 0, found.stderr
