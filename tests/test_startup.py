"""Help and mistakes are answered without torch; ``import latte`` registers the models; ctrl-C ends a start quietly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

import latte
from latte.cli.main import COMMANDS

HEAVY = ("torch", "transformers", "matplotlib", "datasets", "numpy")
COMMAND = f"""
import json, sys, latte_cli
try:
    code = latte_cli.main(sys.argv[1:])
except SystemExit as ended:
    code = ended.code
print(json.dumps([code, [name for name in {HEAVY} if name in sys.modules]]))
"""
# Raises where ctrl-C would: while the module named first is being imported.
STOPPED = """
import sys, latte_cli
class Stop:
    def find_spec(self, name, path=None, target=None):
        if name == sys.argv[1]:
            raise KeyboardInterrupt
sys.meta_path.insert(0, Stop())
sys.exit(latte_cli.main(sys.argv[2:]))
"""
# The same by the signal, where the importing code swallows every exception, as parts of torch and transformers do.
SWALLOWED = STOPPED.replace("import sys", "import signal, sys").replace(
    "            raise KeyboardInterrupt\n",
    "            try:\n                signal.raise_signal(signal.SIGINT)\n"
    "            except BaseException:\n                pass\n",
)
KINDS = "AutoConfig.for_model('latte'), AutoConfig.for_model('latte-extended')"


def python(code: str, *arguments: str, **more: str) -> subprocess.CompletedProcess:
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path), **more}
    environment.pop("THP_MEM_ALLOC_ENABLE", None)
    return subprocess.run([sys.executable, "-c", code, *arguments], capture_output=True, text=True, env=environment)


@pytest.mark.parametrize(
    ("arguments", "code", "said"),
    [
        (["--help"], 0, "usage: latte COMMAND"),
        (["--version"], 0, f"latte {latte.__version__}"),
        *(([name, "--help"], 0, f"usage: latte {name}") for name in COMMANDS),
        (["trian"], 2, "did you mean 'train'?"),
        (["train", "--train.step", "3"], 2, "did you mean train.steps?"),
        (["doctor", "--tokens", "0"], 2, "tokens is 0, expected at least 1"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, list) else "",
)
def test_help_and_mistakes_import_nothing_heavy(arguments, code, said):
    done = python(COMMAND, *arguments)
    assert said in done.stdout + done.stderr
    assert json.loads(done.stdout.splitlines()[-1]) == [code, []], done.stderr


@pytest.mark.parametrize("name", ["nowhere", "owner/nowhere", "runs/nowhere", "./nowhere", "nowhere.gguf"])
@pytest.mark.parametrize("command", ["generate", "eval", "extend", "inspect"])
def test_a_model_that_is_nowhere_is_one_sentence_before_anything_heavy(command, name, tmp_path):
    more = ["--text", "x"] if command == "inspect" else []
    done = python(COMMAND, command, name, *more, HF_ENDPOINT="http://127.0.0.1:9", HF_HUB_CACHE=str(tmp_path))
    assert f"latte {command}: there is no " in done.stderr
    assert name in done.stderr
    assert len(done.stderr.splitlines()) == 1
    assert json.loads(done.stdout.splitlines()[-1]) == [2, []]


def test_the_console_script_is_the_module_outside_the_package():
    settings = (Path(__file__).parents[1] / "pyproject.toml").read_text()
    assert '\nlatte = "latte_cli:main"\n' in settings
    assert '\npy-modules = ["latte_cli"]\n' in settings


def test_importing_the_package_registers_the_models():
    done = python(f"import latte\nfrom transformers import AutoConfig\nprint([c.model_type for c in ({KINDS})])")
    assert done.stdout == "['latte', 'latte-extended']\n", done.stderr


def test_a_command_registers_the_models_and_sets_the_environment_before_torch():
    done = python(f"""
import os, sys, latte_cli
class Watch:
    def find_spec(self, name, path=None, target=None):
        if name in ("torch", "transformers"):
            print(name, os.environ.get("THP_MEM_ALLOC_ENABLE"))
sys.meta_path.insert(0, Watch())
load = latte_cli.postpone("latte")
import latte.recipe
print(sorted(set(sys.modules) & set({HEAVY})))
load()
from transformers import AutoConfig
print([c.model_type for c in ({KINDS})])
print(all(hasattr(latte, name) for name in latte.__all__), latte.mixers.names() != [], latte.recipe.Recipe.__name__)
""")
    assert done.stdout.splitlines() == [
        "[]",
        "torch 1",
        "transformers 1",
        "['latte', 'latte-extended']",
        "True True Recipe",
    ], done.stderr


def test_a_package_that_is_imported_already_is_not_run_again():
    import latte_cli

    before = latte.LatteForCausalLM
    latte_cli.postpone("latte")()
    assert sys.modules["latte"].LatteForCausalLM is before


@pytest.mark.parametrize(
    ("code", "module"),
    [
        (STOPPED, "latte.cli.main"),
        (STOPPED, "jsonargparse"),
        (STOPPED, "latte.cli.doctor"),
        (STOPPED, "torch"),
        (SWALLOWED, "torch"),
        (SWALLOWED, "latte.doctor"),
    ],
)
def test_ctrl_c_while_starting_is_one_line(code, module):
    done = python(code, module, "doctor")
    assert (done.returncode, done.stdout, done.stderr) == (130, "", "latte: stopped\n")
