"""The depth network as an ONNX file, `depth.onnx`, for people and tools that want to look at it; nothing reads it."""

from __future__ import annotations

from pathlib import Path

import onnx
from onnx import TensorProto, helper, numpy_helper

from yggc import __version__
from yggrt.depth import DepthNetwork
from yggrt.wire import write_atomically

ONNX_FILE = "depth.onnx"
OPSET, IR_VERSION = 17, 8
"""Old enough for every runtime in use."""


def write_onnx(path: Path, network: DepthNetwork) -> None:
    """hidden float32[rows, H] to expected_tokens float32[rows, depths], a column a depth. Raises OSError."""
    first, second = network.layers
    count = len(network.depths)
    weights = {
        "first": first[:-1], "first_bias": first[-1], "second": second[:-1, :count], "second_bias": second[-1, :count]
    }  # fmt: skip
    graph = helper.make_graph(
        [
            helper.make_node("Gemm", ["hidden", "first", "first_bias"], ["before"]),
            helper.make_node("Relu", ["before"], ["units"]),
            helper.make_node("Gemm", ["units", "second", "second_bias"], ["expected_tokens"]),
        ],
        "depth",
        [helper.make_tensor_value_info("hidden", TensorProto.FLOAT, ["rows", network.hidden_size])],
        [helper.make_tensor_value_info("expected_tokens", TensorProto.FLOAT, ["rows", count])],
        [numpy_helper.from_array(value.copy(), name) for name, value in weights.items()],
        doc_string=f"Tokens that an iteration with a draft of {', '.join(map(str, network.depths))} passes will emit.",
    )
    model = helper.make_model(
        graph,
        producer_name="yggc",
        producer_version=__version__,
        opset_imports=[helper.make_opsetid("", OPSET)],
        ir_version=IR_VERSION,
    )
    onnx.checker.check_model(model, full_check=True)
    write_atomically(path, model.SerializeToString())
