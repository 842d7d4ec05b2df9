"""A GGUF file as a folder of OpenVINO's with int8 weights (nncf: per row, activations as they are).

    PYTHON openvino_files.py FILE.gguf FOLDER          in the environment of OpenVINO GenAI

GenAI reads a GGUF file as a target, but draft models and nncf want its own format.
"""

from __future__ import annotations

import shutil
import sys
import tempfile
from pathlib import Path


def main() -> None:
    file, out = map(Path, sys.argv[1:])
    try:
        import nncf
    except ImportError:
        raise SystemExit(f"nncf is not installed in {sys.prefix}") from None
    import openvino as ov
    import openvino_genai as genai

    with tempfile.TemporaryDirectory(dir=out.parent) as scratch:
        # GenAI writes what it read beside the file that it read
        (Path(scratch) / file.name).symlink_to(file.resolve())
        genai.LLMPipeline(str(Path(scratch) / file.name), "CPU", enable_save_ov_model=True)
        model = ov.Core().read_model(Path(scratch) / "openvino_model.xml")
        small = nncf.compress_weights(model, mode=nncf.CompressWeightsMode.INT8_ASYM)
        shutil.rmtree(out, ignore_errors=True)
        out.mkdir()
        ov.save_model(small, out / "openvino_model.xml")
        for one in Path(scratch).glob("openvino_*tokenizer.*"):
            shutil.copy(one, out)


if __name__ == "__main__":
    main()
