"""The CPU kernels through their C interface: against brute force, and each row the same bits in any company."""

from __future__ import annotations

import ctypes
import itertools
from collections import Counter
from collections.abc import Callable, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn import functional

from yggc.kernels import OPERATORS, c_interface, compile_kernels, find_compiler, first_error_line
from yggc.packing import BLOCK, AffineWeights, Format, PackedMatrix, pack, unpack
from yggrt.artifacts import MASK_VALUE
from yggrt.errors import BuildError
from yggrt.sampling import REFERENCE, DrawnTree, LawKernels, SamplingOptions
from yggrt.sampling import law as reference_law
from yggrt.target import detect_target

PLAIN = {Format.FLOAT32: torch.float32, Format.BFLOAT16: torch.bfloat16, Format.FLOAT16: torch.float16}
DTYPES = (torch.float32, torch.bfloat16)
UNKNOWN_FORMAT = 9
C_TYPES = {
    "AtenTensorHandle": ctypes.c_void_p,
    "int64_t": ctypes.c_int64,
    "int32_t": ctypes.c_int32,
    "double": ctypes.c_double,
    "AtenTensorHandle*": ctypes.POINTER(ctypes.c_void_p),
}


class KernelFailure(Exception):
    """A kernel returned an error code."""


class Kernels:
    """The compiled library; a call takes tensors and numbers in the operator's order and returns its results."""

    def __init__(self, path: Path) -> None:
        self.handle = library = ctypes.CDLL(str(path))
        self._delete = library.aoti_torch_delete_tensor_object
        self._delete.argtypes = [ctypes.c_void_p]
        self._functions = {}
        for operator, (declaration,) in c_interface().items():
            name = declaration.split("(")[0].split()[-1]
            types = declaration[declaration.index("(") + 1 : -1].split(", ")
            function = getattr(library, name)
            function.argtypes = [C_TYPES[kind] for kind in types]
            self._functions[operator] = (function, types.count("AtenTensorHandle*"))

    def __call__(self, operator: torch._ops.OpOverload, *arguments: Tensor | int | float) -> list[Tensor]:
        function, num_results = self._functions[operator]
        tensors = [argument for argument in arguments if isinstance(argument, Tensor)]
        handles = [_pointer(capsule) for capsule in torch._C._aoti.unsafe_alloc_void_ptrs_from_tensors(tensors)]
        remaining = iter(handles)
        values = [next(remaining) if isinstance(argument, Tensor) else argument for argument in arguments]
        results = [ctypes.c_void_p() for _ in range(num_results)]
        code = function(*values, *map(ctypes.byref, results))
        for handle in handles:
            self._delete(handle)
        if code:
            for result in results:
                if result:
                    self._delete(result)
            raise KernelFailure(code)
        return [torch._C._aoti.alloc_tensor_by_stealing_from_void_ptr(_capsule(result)) for result in results]

    def linear(self, inputs: Tensor, matrix: PackedMatrix) -> Tensor:
        return self(OPERATORS.linear, inputs, matrix.data, matrix.rows, int(matrix.format))[0]

    def embedding(self, tokens: Tensor, matrix: PackedMatrix, narrow: bool = False) -> Tensor:
        return self(OPERATORS.embedding, tokens, matrix.data, matrix.features, int(matrix.format), narrow)[0]

    def attention(self, queries: Tensor, keys: Tensor, values: Tensor, mask: Tensor, scale: float) -> Tensor:
        return self(OPERATORS.attention, queries, keys, values, mask, scale)[0]

    def children(self, logits: Tensor, count: int) -> tuple[Tensor, Tensor]:
        columns, log_q = self(OPERATORS.children, logits, count)
        return columns, log_q


def _pointer(capsule: object) -> int:
    function = ctypes.pythonapi.PyCapsule_GetPointer
    function.restype, function.argtypes = ctypes.c_void_p, [ctypes.py_object, ctypes.c_char_p]
    return function(capsule, None)


def _capsule(pointer: ctypes.c_void_p) -> object:
    function = ctypes.pythonapi.PyCapsule_New
    function.restype, function.argtypes = ctypes.py_object, [ctypes.c_void_p, ctypes.c_char_p, ctypes.c_void_p]
    return function(pointer, None, None)


@pytest.fixture(scope="module", params=["", "-mno-avx512vnni"], ids=["this CPU", "without whole-number products"])
def kernels(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Kernels:
    if request.param and "avx512_vnni" not in detect_target("cpu").instruction_set:
        pytest.skip("this CPU has no other way to multiply levels")
    path = tmp_path_factory.mktemp("kernels") / "kernels.so"
    with pytest.MonkeyPatch.context() as patch:
        if request.param:
            patch.setenv("CXX", f"{find_compiler()[0]} {request.param}")
        compile_kernels(path)
    return Kernels(path)


def make_matrix(kind: Format, rows: int, features: int) -> PackedMatrix:
    """A random matrix whose smallest format is `kind`."""
    if kind in PLAIN:
        matrix = pack(torch.randn(rows, features).to(PLAIN[kind]))
    else:
        affine = make_levels(kind, rows, features)
        matrix = pack(affine.values(), affine)
    assert matrix.format is kind
    return matrix


def make_levels(kind: Format, rows: int, features: int) -> AffineWeights:
    bits = 4 if kind is Format.AFFINE4 else 8
    levels = torch.randint(0, 2**bits, (rows, features), dtype=torch.uint8)
    blocks = (rows, features // BLOCK)
    return AffineWeights(levels, torch.randn(blocks).half() / 2**bits, torch.randn(blocks).half() / 4, bits)


# Products

MATRICES = [(kind, rows, features) for kind in Format for rows, features in ((1, 32), (33, 64), (70, 160))]
MATRICES += [(kind, 45, features) for kind in PLAIN for features in (1, 100)]
"""Formats with rows that do not fill a panel of 32, and features that do not fill the 64 decoded at a time."""


def test_of_a_compilers_output_the_line_that_says_what_is_wrong_is_told():
    output = "CppCompileError: C++ compile error\n\nCommand:\ng++ x.cpp\n\nOutput:\nIn file included from x.cpp:1:\n"
    assert first_error_line(f"{output}m.h:15:10: fatal error: cuda.h: No such file\n  15 | #include") == (
        "m.h:15:10: fatal error: cuda.h: No such file"
    )
    assert first_error_line(output) == "CppCompileError: C++ compile error"
    assert first_error_line("Killed\n") == "Killed" and first_error_line("") == "no output"


@pytest.mark.parametrize("kind, columns, features", MATRICES)
def test_linear_equals_the_product_in_float64_at_every_width(kernels, kind, columns, features):
    torch.manual_seed(columns)
    matrix = make_matrix(kind, columns, features)
    for width in (*range(1, 10), 16, 20, 64, 65, 150):
        inputs = torch.randn(width, features)
        exact = inputs.double() @ unpack(matrix).double().t()
        found = kernels.linear(inputs, matrix)
        assert found.shape == (width, columns) and found.dtype == torch.float32
        torch.testing.assert_close(found.double(), exact, rtol=1e-5, atol=1e-5 * float(exact.abs().max()))


@pytest.mark.parametrize("kind", Format)
@pytest.mark.parametrize("width", [3, 20])
def test_linear_of_bfloat16_is_the_float32_result_rounded(kernels, kind, width):
    torch.manual_seed(1)
    matrix = make_matrix(kind, 70, 160)
    inputs = torch.randn(width, 160).bfloat16()
    found = kernels.linear(inputs, matrix)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, kernels.linear(inputs.float(), matrix).bfloat16())


@pytest.mark.parametrize("shape", [(96,), (1, 2, 96), (2, 3, 96), (3, 1, 4, 96)])
def test_linear_keeps_leading_dimensions(kernels, shape):
    torch.manual_seed(2)
    matrix = make_matrix(Format.BFLOAT16, 33, 96)
    inputs = torch.randn(shape)
    found = kernels.linear(inputs, matrix)
    assert found.shape == (*shape[:-1], 33) and found.is_contiguous()
    assert torch.equal(found.view(-1, 33), kernels.linear(inputs.view(-1, 96), matrix))


@pytest.mark.field(28)
@pytest.mark.parametrize("kernels", [""], indirect=True)
def test_a_matrix_of_more_than_4_gib_is_read_to_its_end(kernels):
    """Nearly all of it is zeros that no memory was ever given to."""
    features = 1024
    last = make_matrix(Format.FLOAT32, 32, features)
    num_panels = 2**32 // last.data.numel() + 2
    data = torch.zeros(num_panels * last.data.numel(), dtype=torch.uint8)
    data[-last.data.numel() :] = last.data.flatten()
    matrix = PackedMatrix(data, 32 * num_panels, features, Format.FLOAT32)
    inputs = torch.randn(1, features)
    found = kernels.linear(inputs, matrix)
    assert torch.equal(found[:, -32:], kernels.linear(inputs, last))
    assert not found[:, :-32].any()
    token = torch.tensor([matrix.rows - 3])
    assert torch.equal(kernels.embedding(token, matrix), kernels.embedding(torch.tensor([29]), last))


@pytest.mark.field(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind, columns, features", MATRICES)
def test_a_row_of_a_product_is_the_same_bits_alone_and_among_any_others(kernels, kind, columns, features, dtype):
    torch.manual_seed(features)
    matrix = make_matrix(kind, columns, features)
    inputs = torch.randn(20, features).to(dtype)
    whole = kernels.linear(inputs, matrix)
    for count in range(1, 20):
        assert torch.equal(kernels.linear(inputs[:count], matrix), whole[:count])
        assert torch.equal(kernels.linear(inputs[-count:], matrix), whole[-count:])
    for row in range(20):
        assert torch.equal(kernels.linear(inputs[row : row + 1], matrix), whole[row : row + 1])


@pytest.mark.field(8)
@pytest.mark.parametrize("kind", Format)
def test_matrices_below_one_another_give_the_columns_of_each(kernels, kind):
    torch.manual_seed(3)
    upper, lower = make_matrix(kind, 45, 96), make_matrix(kind, 20, 96)
    whole = pack(torch.cat((unpack(upper), unpack(lower))))
    if kind not in PLAIN:
        parts = [make_levels(kind, 45, 96), make_levels(kind, 20, 96)]
        upper, lower = (pack(part.values(), part) for part in parts)
        fields = [torch.cat([getattr(part, name) for part in parts]) for name in ("levels", "scales", "offsets")]
        both = AffineWeights(*fields, parts[0].bits)
        whole = pack(both.values(), both)
    inputs = torch.randn(5, 96)
    found = kernels.linear(inputs, whole)
    assert torch.equal(found[:, :45], kernels.linear(inputs, upper))
    assert torch.equal(found[:, 45:], kernels.linear(inputs, lower))


@pytest.mark.field(8)
@pytest.mark.parametrize("kind", [Format.AFFINE8, Format.AFFINE4])
@pytest.mark.parametrize("outlier", [1.0, 300.0])
def test_levels_are_multiplied_as_exactly_as_one_float32_sum(kernels, kind, outlier):
    torch.manual_seed(4)
    matrix = make_matrix(kind, 96, 1536)
    inputs = torch.randn(8, 1536)
    inputs[:, 40] *= outlier
    exact = inputs.double() @ unpack(matrix).double().t()
    products = (inputs[:, None, :] * unpack(matrix)).numpy()
    usual = torch.from_numpy(np.add.accumulate(products, axis=2)[:, :, -1]).double() - exact
    error = kernels.linear(inputs, matrix).double() - exact
    assert float(error.square().mean()) < 2 * float(usual.square().mean())


@pytest.mark.parametrize("kind", [Format.AFFINE8, Format.AFFINE4])
def test_levels_times_zeros_denormals_and_what_is_not_finite(kernels, kind):
    matrix = make_matrix(kind, 33, 64)
    assert not kernels.linear(torch.zeros(1, 64), matrix).any()
    assert kernels.linear(torch.full((1, 64), 1e-42), matrix).abs().max() < 1e-30
    for value in (torch.inf, -torch.inf, torch.nan):
        inputs = torch.ones(2, 64)
        inputs[1, 37] = value
        found = kernels.linear(inputs, matrix)
        assert found[0].isfinite().all() and not found[1].isfinite().any()


@pytest.mark.parametrize("kind", [Format.AFFINE8, Format.AFFINE4])
@pytest.mark.parametrize("sign", [1, -1])
def test_levels_times_inputs_all_as_large_as_the_largest(kernels, kind, sign):
    """The whole numbers' last digit must hold them."""
    matrix = make_matrix(kind, 32, 32)
    for largest in torch.logspace(-20, 20, 81).tolist():
        inputs = torch.full((1, 32), sign * largest)
        exact = inputs.double() @ unpack(matrix).double().t()
        torch.testing.assert_close(kernels.linear(inputs, matrix).double(), exact, rtol=1e-5, atol=1e-5 * largest)


# Embeddings


@pytest.mark.parametrize("narrow", [False, True])
@pytest.mark.parametrize("kind, rows, features", [entry for entry in MATRICES if entry[1] > 33])
def test_embedding_rows_are_the_unpacked_rows_bit_for_bit(kernels, kind, rows, features, narrow):
    torch.manual_seed(rows + features)
    matrix = make_matrix(kind, rows, features)
    tokens = torch.tensor([[0, 31, 32], [rows - 1, 33, 31]])  # at the borders of panels, one twice
    found = kernels.embedding(tokens, matrix, narrow)
    expected = unpack(matrix)[tokens]
    assert torch.equal(found, expected.bfloat16() if narrow else expected)
    assert found.dtype == (torch.bfloat16 if narrow else torch.float32)


def test_every_row_of_an_embedding_is_found(kernels):
    torch.manual_seed(4)
    matrix = make_matrix(Format.AFFINE4, 70, 96)
    assert torch.equal(kernels.embedding(torch.arange(70), matrix), unpack(matrix))


# Attention


class Scene:
    """Random inputs of an attention, as a step has them: queries turned, keys and values in longer buffers."""

    def __init__(self, heads: int, kv_heads: int, key_dim: int, value_dim: int, width: int, extent: int) -> None:
        self.queries = torch.randn(width, heads, key_dim).transpose(0, 1)
        self.keys = torch.randn(kv_heads, extent + 5, key_dim)[:, :extent]
        self.values = torch.randn(kv_heads, extent + 5, value_dim)[:, :extent]
        self.mask = torch.where(torch.rand(width, extent + 3) < 0.5, 0.0, MASK_VALUE)[:, :extent]
        self.mask[:, 16:48] = MASK_VALUE  # whole blocks that no row sees
        self.mask[torch.arange(width), torch.arange(width) % min(extent, 16)] = 0.0
        self.scale = key_dim**-0.5

    def to(self, dtype: torch.dtype) -> Scene:
        for name in ("queries", "keys", "values", "mask"):
            tensor: Tensor = getattr(self, name)
            changed = torch.empty_strided(tensor.shape, tensor.stride(), dtype=dtype)
            setattr(self, name, changed.copy_(tensor))
        return self

    def run(self, attention: Callable[..., Tensor], rows: Sequence[int] | slice = slice(None)) -> Tensor:
        return attention(self.queries[:, rows], self.keys, self.values, self.mask[rows], self.scale)

    def exact(self) -> Tensor:
        """PyTorch's attention in float64."""
        queries, keys, values, mask = (
            tensor.double()[None] for tensor in (self.queries, self.keys, self.values, self.mask)
        )
        rows = functional.scaled_dot_product_attention(
            queries, keys, values, attn_mask=mask, scale=self.scale, enable_gqa=True
        )
        return rows[0].transpose(0, 1)


SCENES = [
    # heads, kv_heads, key_dim, value_dim, width, extent
    (1, 1, 1, 1, 1, 1),
    (4, 4, 16, 16, 1, 15),
    (4, 2, 20, 12, 5, 37),
    (9, 3, 64, 64, 7, 130),
    (6, 1, 40, 100, 3, 17),
    (2, 2, 24, 80, 30, 64),
]


@pytest.mark.parametrize("scene", SCENES)
def test_attention_equals_pytorchs(kernels, scene):
    torch.manual_seed(5)
    inputs = Scene(*scene)
    found = inputs.run(kernels.attention)
    assert found.shape == (scene[4], scene[0], scene[3]) and found.is_contiguous()
    torch.testing.assert_close(found.double(), inputs.exact(), rtol=1e-5, atol=2e-6)


def test_attention_adds_a_mask_that_does_not_hide(kernels):
    torch.manual_seed(6)
    inputs = Scene(4, 2, 20, 12, 5, 37)
    inputs.mask += torch.randn(5, 37)
    torch.testing.assert_close(inputs.run(kernels.attention).double(), inputs.exact(), rtol=1e-5, atol=2e-6)


@pytest.mark.parametrize("size", [0.0, 30.0, 1e4])
def test_attention_is_exact_where_scores_are_equal_or_far_apart(kernels, size):
    torch.manual_seed(7)
    inputs = Scene(4, 2, 16, 16, 5, 37)
    inputs.queries = inputs.queries * size
    torch.testing.assert_close(inputs.run(kernels.attention).double(), inputs.exact(), rtol=1e-4, atol=2e-5)


@pytest.mark.parametrize("scene", SCENES)
def test_attention_of_bfloat16_is_the_float32_result_rounded(kernels, scene):
    torch.manual_seed(8)
    inputs = Scene(*scene).to(torch.bfloat16)
    found = inputs.run(kernels.attention)
    assert found.dtype == torch.bfloat16
    assert torch.equal(found, inputs.to(torch.float32).run(kernels.attention).bfloat16())


@pytest.mark.field(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scene", SCENES)
def test_a_row_of_attention_is_the_same_bits_alone_and_among_any_others(kernels, scene, dtype):
    torch.manual_seed(9)
    inputs = Scene(*scene).to(dtype)
    whole = inputs.run(kernels.attention)
    for row in range(scene[4]):
        assert torch.equal(inputs.run(kernels.attention, slice(row, row + 1)), whole[row : row + 1])
        assert torch.equal(inputs.run(kernels.attention, slice(row + 1)), whole[: row + 1])
    assert torch.equal(inputs.run(kernels.attention, range(scene[4])[::-1]), whole.flip(0))


@pytest.fixture
def threads():
    """Sets how many threads loops have; as before afterwards."""
    before = torch.get_num_threads()
    yield torch.set_num_threads
    torch.set_num_threads(before)


@pytest.mark.field(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scene", SCENES)
def test_attention_is_the_same_bits_with_any_number_of_threads(kernels, scene, dtype, threads):
    torch.manual_seed(11)
    inputs = Scene(*scene).to(dtype)
    threads(1)
    alone = inputs.run(kernels.attention)
    for count in (2, 3, 5):
        threads(count)
        assert torch.equal(inputs.run(kernels.attention), alone)


@pytest.mark.field(8)
@pytest.mark.parametrize("kind", Format)
def test_a_product_is_the_same_bits_with_any_number_of_threads(kernels, kind, threads):
    torch.manual_seed(12)
    matrix = make_matrix(kind, 70, 160)
    inputs = torch.randn(150, 160)
    threads(1)
    alone = kernels.linear(inputs, matrix)
    for count in (2, 3, 5):
        threads(count)
        assert torch.equal(kernels.linear(inputs, matrix), alone)
        for row in (0, 63, 64, 128, 149):
            assert torch.equal(kernels.linear(inputs[row : row + 1], matrix), alone[row : row + 1])


@pytest.mark.field(8)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("scene", SCENES)
def test_slots_that_a_row_does_not_see_change_no_bit_wherever_they_lie(kernels, scene, dtype):
    torch.manual_seed(10)
    inputs = Scene(*scene).to(dtype)
    whole = inputs.run(kernels.attention)
    for row in range(scene[4]):
        visible = (inputs.mask[row] == 0).nonzero()[:, 0]
        query = inputs.queries[:, row : row + 1]
        keys, values = inputs.keys[:, visible].contiguous(), inputs.values[:, visible].contiguous()
        for gap in (0, 1, 3, 16):  # invisible slots between any two, with contents of their own
            places = torch.arange(len(visible)) * (gap + 1) + gap // 2
            extent = int(places[-1]) + 1 + gap
            spread_keys = torch.randn(len(keys), extent, keys.shape[2]).to(dtype) * 1e6
            spread_values = torch.randn(len(values), extent, values.shape[2]).to(dtype) * 1e6
            spread_keys[:, places], spread_values[:, places] = keys, values
            mask = torch.full((1, extent), MASK_VALUE, dtype=dtype)
            mask[:, places] = 0
            found = kernels.attention(query, spread_keys, spread_values, mask, inputs.scale)
            assert torch.equal(found, whole[row : row + 1])


# Children


def best_by_sorting(logits: Tensor, count: int) -> tuple[list[list[int]], Tensor]:
    """Columns by (logit, column) and their log probabilities; what is not finite counts as +-1e30, NaN as -1e30."""
    rows = []
    for row in logits.tolist():
        rows.append([-1e30 if value != value else min(max(value, -1e30), 1e30) for value in row])
    columns = [sorted(range(len(row)), key=lambda column, row=row: (-row[column], column))[:count] for row in rows]
    log_q = torch.log_softmax(torch.tensor(rows, dtype=torch.float64), dim=-1)
    return columns, log_q.gather(1, torch.tensor(columns)).float()


@pytest.fixture(params=["kernel", "reference"])
def children(request, kernels) -> Callable[[Tensor, int], tuple[Tensor, Tensor]]:
    return kernels.children if request.param == "kernel" else OPERATORS.children


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize(
    "rows, columns, count", [(1, 1, 1), (3, 9, 9), (2, 15, 4), (3, 17, 8), (2, 300, 1), (5, 5000, 8)]
)
def test_children_are_the_best_in_order(children, rows, columns, count, dtype):
    torch.manual_seed(11)
    logits = (torch.randn(rows, columns) * 4).to(dtype)  # in bfloat16 many are equal
    found, log_q = children(logits, count)
    expected, expected_log_q = best_by_sorting(logits, count)
    assert found.tolist() == expected and found.dtype == torch.int64
    torch.testing.assert_close(log_q, expected_log_q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [7, 40, 333])
def test_the_lower_column_is_first_among_equals(children, columns, dtype):
    torch.manual_seed(12)
    logits = torch.randint(0, 3, (6, columns)).to(dtype)
    logits[0] = 0
    logits[1] = torch.arange(columns) % 2
    found, log_q = children(logits, 7)
    expected, expected_log_q = best_by_sorting(logits, 7)
    assert found.tolist() == expected
    torch.testing.assert_close(log_q, expected_log_q, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("columns", [7, 40, 333])
def test_logits_that_are_not_finite_break_nothing(children, columns, dtype):
    torch.manual_seed(13)
    logits = torch.randn(9, columns)
    logits[0, 5] = torch.nan
    logits[1, -1] = torch.nan
    logits[2, -1] = torch.inf
    logits[3, [1, 4]] = torch.inf
    logits[4, 3] = -torch.inf
    logits[5] = torch.nan
    logits[6] = torch.inf
    logits[7] = -torch.inf
    logits[8, ::2], logits[8, 1], logits[8, 3] = -torch.inf, torch.inf, torch.nan
    logits = logits.to(dtype)
    found, log_q = children(logits, 5)
    expected, expected_log_q = best_by_sorting(logits, 5)
    assert found.tolist() == expected
    assert torch.isfinite(log_q).all()
    torch.testing.assert_close(log_q, expected_log_q, rtol=1e-5, atol=1e-5)


@pytest.mark.field(8)
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_rows_children_are_the_same_bits_alone_and_among_any_others(kernels, dtype):
    torch.manual_seed(14)
    logits = torch.randn(9, 333).to(dtype)
    whole = kernels.children(logits, 8)
    for row in range(9):
        alone = kernels.children(logits[row : row + 1], 8)
        assert all(torch.equal(part, among[row : row + 1]) for part, among in zip(alone, whole, strict=True))


# Draws


@pytest.fixture(params=["kernel", "reference"])
def draw(request, kernels) -> Callable[..., list[Tensor]]:
    def run(*given) -> list[Tensor]:
        return kernels(OPERATORS.draw, *given) if request.param == "kernel" else list(OPERATORS.draw(*given))

    return run


def candidates(rows: int, size: int) -> tuple[Tensor, Tensor]:
    """(tokens, log probabilities), most likely first."""
    torch.manual_seed(16)
    log_q = torch.log_softmax(torch.randn(rows, size) * 3, dim=-1).sort(dim=-1, descending=True).values
    return torch.stack([torch.randperm(1000)[:size] for _ in range(rows)]), log_q


@pytest.mark.parametrize("rows, size, count", [(1, 1, 1), (3, 32, 8), (2, 9, 9), (8, 16, 1)])
def test_without_temperature_the_favourites_are_offered(draw, rows, size, count):
    tokens, log_q = candidates(rows, size)
    drawn, places, _ = draw(tokens, log_q, torch.full((rows, size), torch.nan), torch.zeros(1), count)
    assert torch.equal(drawn, tokens[:, :count]) and torch.equal(places, log_q[:, :count])


@pytest.mark.parametrize("temperature", [1e-3, 0.6, 1.0, 40.0])
@pytest.mark.parametrize("rows, size, count", [(1, 1, 1), (3, 32, 8), (2, 9, 9), (8, 16, 1)])
def test_draws_are_the_order_of_the_noisy_law(draw, rows, size, count, temperature):
    tokens, log_q = candidates(rows, size)
    noise = torch.distributions.Gumbel(0.0, 1.0).sample((rows, size))
    drawn, places, law = draw(tokens, log_q, noise, torch.tensor([temperature]), count)
    expected = torch.log_softmax(log_q.double() / temperature, dim=-1)
    torch.testing.assert_close(law.double(), expected, rtol=1e-4, atol=1e-4)
    order = (expected + noise).argsort(dim=-1, descending=True)[:, :count]
    assert torch.equal(drawn, tokens.gather(1, order))
    sureness = (expected.exp() * expected).sum(-1, keepdim=True).expand(-1, count)
    torch.testing.assert_close(places.double(), sureness, rtol=1e-4, atol=1e-5)


def test_draws_have_the_law_of_drawing_without_replacement(draw):
    """Chi-square of the first two of 20,000 draws."""
    tokens, log_q = candidates(1, 4)
    count = 20_000
    noise = torch.distributions.Gumbel(0.0, 1.0).sample((count, 4))
    rows = [each.expand(count, -1).contiguous() for each in (tokens, log_q)]
    drawn, _, law = draw(*rows, noise, torch.tensor([0.7]), 2)
    chances = law[0].exp().tolist()
    square = 0.0
    for first, second in itertools.permutations(range(4), 2):
        expected = count * chances[first] * chances[second] / (1 - chances[first])
        found = int(((drawn[:, 0] == tokens[0, first]) & (drawn[:, 1] == tokens[0, second])).sum())
        square += (found - expected) ** 2 / expected
    assert square < 45  # eleven degrees of freedom; one in a hundred thousand


def bad_draw() -> dict[str, tuple]:
    tokens, log_q = candidates(4, 4)
    noise, warm = torch.zeros(4, 4), torch.ones(1)
    return {
        "turned": (tokens, log_q.t(), noise, warm, 2),
        "fewer rows of noise": (tokens, log_q, noise[:3], warm, 2),
        "less noise in a row": (tokens, log_q, torch.zeros(4, 3), warm, 2),
        "tokens of another dtype": (tokens.int(), log_q, noise, warm, 2),
        "float64": (tokens, log_q.double(), noise, warm, 2),
        "two temperatures": (tokens, log_q, noise, torch.ones(2), 2),
        "a temperature of another dtype": (tokens, log_q, noise, warm.double(), 2),
        "more than there are": (tokens, log_q, noise, warm, 5),
        "none": (tokens, log_q, noise, warm, 0),
    }


# The law that tokens are drawn from

SAMPLED = [
    {}, {"top_k": 1}, {"top_k": 7}, {"top_k": 60}, {"top_k": 5000}, {"top_p": 0.9}, {"top_p": 1e-9}, {"top_p": 0.9999},
    {"min_p": 0.1}, {"min_p": 1.0}, {"top_k": 20, "top_p": 0.8, "min_p": 0.02},
]  # fmt: skip


@pytest.fixture
def laws(kernels) -> LawKernels:
    return LawKernels(kernels.handle)


def choose(laws: LawKernels, logits: np.ndarray, options: SamplingOptions, number: float) -> int:
    return laws.choose(torch.from_numpy(logits), options, torch.tensor([number], dtype=torch.float64))


def edges_of(chances: np.ndarray) -> np.ndarray:
    """Running sums of a law, from 0 to 1: token t is drawn by the numbers from edge t to edge t + 1."""
    sums = np.concatenate([[0.0], np.cumsum(chances, dtype=np.float64)])
    return sums / sums[-1]


@pytest.mark.parametrize("temperature", [1e-4, 0.3, 1.0, 7.0])
@pytest.mark.parametrize(
    "given", SAMPLED, ids=lambda given: "-".join(f"{name}={given[name]}" for name in given) or "all"
)
@pytest.mark.parametrize("size", [1, 5, 127, 128, 1000, 4096 + 77])
def test_tokens_are_drawn_from_the_law_of_the_reference(laws, size, given, temperature):
    options = SamplingOptions(temperature=temperature, **given)
    for seed, spread in ((0, 0.5), (1, 4.0), (2, 30.0)):
        chance = np.random.default_rng(seed)
        logits = (chance.standard_normal(size) * spread).astype(np.float32)
        law = reference_law(logits, options)
        edges = edges_of(law)
        slack = 1e-3 if given.get("top_p", 1.0) < 1 else 2e-5  # at its edge the two may keep one token more or less
        likely = np.flatnonzero(law > 20 * slack)[:40]
        for token in likely:  # the numbers just within a token's share draw it
            width = edges[token + 1] - edges[token]
            for share in (0.1, 0.5, 0.9):
                assert choose(laws, logits, options, edges[token] + share * width) == token
        for number in [0.0, 1 - 2**-53, *chance.random(30)]:
            token = choose(laws, logits, options, number)
            assert edges[token] - slack <= number <= edges[token + 1] + slack
            assert law[token] > 0 or given.get("top_p", 1.0) < 1


def test_equals_at_the_edge_of_top_k_are_all_kept(laws):
    logits = np.array([3.0, 1.0, 2.0, 2.0, 0.0, 2.0], np.float32)
    options = SamplingOptions(temperature=1.0, top_k=2)
    assert {choose(laws, logits, options, number) for number in np.linspace(0, 0.999, 200)} == {0, 2, 3, 5}


def test_logits_that_are_not_numbers_draw_something_within_the_vocabulary(laws):
    for bad in (np.nan, np.inf, -np.inf):
        for given in SAMPLED:
            logits = np.full(300, bad, np.float32)
            assert 0 <= choose(laws, logits, SamplingOptions(temperature=1.0, **given), 0.7) < 300


def drawn_tree(chance: np.random.Generator, width: int, vocab: int, drawn: int, verifier: np.ndarray) -> DrawnTree:
    """Rows below one another at random; children drawn from laws that are like the verifier's, [width, vocab]."""
    parents = np.array([0, *(int(chance.integers(row)) for row in range(1, width))])
    nodes = chance.permutation(width + 2)[:width]
    ids = np.stack([chance.permutation(vocab)[:drawn] for _ in range(width + 2)])
    log_q = chance.standard_normal((width + 2, drawn)).astype(np.float32)
    for row, node in enumerate(nodes):
        log_q[node] += verifier[row, ids[node]]
    log_q[chance.random(log_q.shape) < 0.1] = -np.inf
    log_q[:, 0] = np.where(np.isinf(log_q).all(axis=1), 0.0, log_q[:, 0])
    tokens = np.zeros(width, np.int64)
    for parent in range(width):
        children = [row for row in range(1, width) if parents[row] == parent]
        law = np.exp(log_q[nodes[parent]].astype(np.float64))
        keys = np.log(law / law.sum(), where=law > 0, out=np.full(drawn, -np.inf)) + chance.gumbel(size=drawn)
        order = np.argsort(-keys)  # the last ones may be dead: never drawn
        for place, row in enumerate(children):
            tokens[row] = ids[nodes[parent], order[place]] if place < drawn else vocab - 1
    return DrawnTree(tokens, parents, nodes, torch.from_numpy(ids), torch.from_numpy(log_q))


@pytest.mark.parametrize(
    "given",
    [{}, {"top_k": 3}, {"top_p": 0.8}, {"min_p": 0.1}, {"repetition_penalty": 1.5}, {"repetition_penalty": 0.7}],
    ids=lambda given: "-".join(given) or "all",
)
@pytest.mark.parametrize("vocab, drawn", [(4, 3), (40, 8), (1000, 32)])
def test_trees_are_walked_as_the_reference_walks_them(laws, vocab, drawn, given):
    """With the same numbers the same rows and the same token; the reference is proved in test_sampling_law.py."""
    options = SamplingOptions(temperature=0.9, **given)
    found = Counter()
    for seed in range(400):
        chance = np.random.default_rng([seed, vocab])
        width = int(chance.integers(1, 13))
        logits = (chance.standard_normal((width, vocab)) * chance.choice([0.1, 2.0, 8.0])).astype(np.float32)
        if seed % 4 == 0:
            logits[:, chance.permutation(vocab)[: vocab // 2]] = -np.inf
        tree = drawn_tree(chance, width, vocab, drawn, np.where(np.isinf(logits), -5, logits))
        if seed % 3 == 0:  # drafter and verifier agree
            for row, node in enumerate(tree.nodes):
                logits[row, tree.ids[node]] += 5
                tree.log_q[node] = torch.from_numpy(logits[row, tree.ids[node]] / np.float32(0.9))
            tree.log_q[tree.log_q.isinf().all(dim=1)] = 0.0
        asked = (tree, torch.from_numpy(logits), options, torch.from_numpy(chance.permutation(vocab)[:2]))
        numbers = torch.from_numpy(chance.random(width))
        expected = REFERENCE.traverse(*asked, numbers)
        found[len(expected[0])] += laws.traverse(*asked, numbers) == expected
    assert found.total() >= 398  # a number may fall where the two round apart
    assert len(found) > 2 and found[1] > 20


def test_a_walk_over_what_is_not_a_number_ends_within_the_vocabulary(laws):
    chance = np.random.default_rng(0)
    for bad in (np.nan, np.inf, -np.inf):
        logits = torch.full((6, 300), bad)
        tree = drawn_tree(chance, 6, 300, 8, np.zeros((6, 300)))
        path, token = laws.traverse(
            tree, logits, SamplingOptions(1.0), torch.tensor([3]), torch.full((6,), 0.5, dtype=torch.float64)
        )
        assert path[0] == 0 and 0 <= token < 300


# The operators' references in Python


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("kind", Format)
def test_references_equal_the_kernels(kernels, kind, dtype):
    torch.manual_seed(15)
    matrix = make_matrix(kind, 70, 96)
    tokens = torch.tensor([[0, 31, 69]])
    close = {"rtol": 2.0**-7, "atol": 2.0**-7} if dtype == torch.bfloat16 else {"rtol": 1e-5, "atol": 1e-5}
    inputs = torch.randn(2, 3, 96).to(dtype)
    expected = OPERATORS.linear(inputs, matrix.data, matrix.rows, int(kind))
    torch.testing.assert_close(kernels.linear(inputs, matrix), expected, **close)
    narrow = dtype == torch.bfloat16
    expected = OPERATORS.embedding(tokens, matrix.data, matrix.features, int(kind), narrow)
    assert torch.equal(kernels.embedding(tokens, matrix, narrow), expected)
    scene = Scene(4, 2, 20, 12, 5, 37).to(dtype)
    torch.testing.assert_close(scene.run(kernels.attention), scene.run(OPERATORS.attention), **close)


# Refusals


def bad_linear() -> dict[str, tuple]:
    matrix = make_matrix(Format.FLOAT32, 33, 64)
    good, rest = torch.randn(64, 64), (matrix.data, 33, int(Format.FLOAT32))
    return {
        "turned": (good.t(), *rest),
        "with gaps": (torch.randn(4, 128)[:, ::2], *rest),
        "rows apart": (torch.randn(4, 128)[:, :64], *rest),
        "float64": (good.double(), *rest),
        "float16": (good.half(), *rest),
        "no dimension": (torch.tensor(1.0), *rest),
        "eight dimensions": (good[(None,) * 6], *rest),
        "an unknown format": (good, matrix.data, 33, UNKNOWN_FORMAT),
        "a negative format": (good, matrix.data, 33, -1),
        "bfloat16 in an unknown format": (good.bfloat16(), matrix.data, 33, UNKNOWN_FORMAT),
    }


def bad_embedding() -> dict[str, tuple]:
    matrix = make_matrix(Format.FLOAT32, 33, 64)
    return {
        "turned": (torch.zeros(2, 3, dtype=torch.int64).t(), matrix.data, 64, int(Format.FLOAT32), False),
        "with gaps": (torch.zeros(8, dtype=torch.int64)[::2], matrix.data, 64, int(Format.FLOAT32), False),
        "an unknown format": (torch.zeros(3, dtype=torch.int64), matrix.data, 64, UNKNOWN_FORMAT, False),
    }


def bad_attention() -> dict[str, tuple]:
    queries, keys, values, mask = torch.randn(2, 3, 8), torch.randn(2, 20, 8), torch.randn(2, 20, 8), torch.zeros(3, 20)
    wide = torch.randn(2, 20, 16)
    return {
        "queries with gaps": (torch.randn(2, 3, 16)[:, :, ::2], keys, values, mask, 1.0),
        "keys with gaps": (queries, wide[:, :, ::2], values, mask, 1.0),
        "keys in wider rows": (queries, wide[:, :, :8], values, mask, 1.0),
        "values with gaps": (queries, keys, wide[:, :, ::2], mask, 1.0),
        "values in wider rows": (queries, keys, wide[:, :, :8], mask, 1.0),
        "mask turned": (queries, keys, values, torch.zeros(20, 3).t(), 1.0),
        "float64": (queries.double(), keys.double(), values.double(), mask.double(), 1.0),
        "keys of another dtype": (queries, keys.bfloat16(), values, mask, 1.0),
        "values of another dtype": (queries, keys, values.bfloat16(), mask, 1.0),
        "mask of another dtype": (queries, keys, values, mask.bool(), 1.0),
    }


@pytest.mark.parametrize("count", [1, 2, 17, 88, 300])
def test_the_order_is_descending_and_stable(kernels, count):
    values = torch.randint(-4, 4, (count,)).float()
    values[::5] = -torch.inf
    expected = sorted(range(count), key=lambda index: -float(values[index]))  # Python's sort is stable
    assert kernels(OPERATORS.order, values)[0].tolist() == expected
    assert OPERATORS.order(values).tolist() == expected


def bad_order() -> dict[str, tuple]:
    values = torch.randn(20)
    return {"two dimensions": (values[None],), "apart": (values[::2],), "float64": (values.double(),)}


def bad_children() -> dict[str, tuple]:
    logits = torch.randn(20, 20)
    return {
        "turned": (logits.t(), 3),
        "rows apart": (logits[:, :10], 3),
        "one dimension": (logits[0], 3),
        "three dimensions": (logits[None], 3),
        "float64": (logits.double(), 3),
        "more than there are": (logits, 21),
        "none": (logits, 0),
    }


BAD = {
    "linear": bad_linear,
    "embedding": bad_embedding,
    "attention": bad_attention,
    "children": bad_children,
    "draw": bad_draw,
    "order": bad_order,
}


@pytest.mark.parametrize("kernel, fault", [(kernel, fault) for kernel, make in BAD.items() for fault in make()])
def test_what_a_kernel_cannot_take_is_an_error_code(kernels, kernel, fault):
    with pytest.raises(KernelFailure):
        kernels(getattr(OPERATORS, kernel), *BAD[kernel]()[fault])


def write_script(path: Path, text: str) -> Path:
    path.write_text(f"#!/bin/sh\n{text}\n")
    path.chmod(0o755)
    return path


def refusal(path: Path) -> str:
    with pytest.raises(BuildError) as caught:
        compile_kernels(path)
    assert "\n" not in str(caught.value)
    assert not path.exists()
    return str(caught.value)


def test_a_missing_compiler_is_named(tmp_path, monkeypatch):
    monkeypatch.setenv("CXX", "no-such-compiler")
    assert "looked for no-such-compiler)" in refusal(tmp_path / "kernels.so")
    monkeypatch.delenv("CXX")
    monkeypatch.setenv("PATH", str(tmp_path))
    assert "looked for g++ and clang++)" in refusal(tmp_path / "kernels.so")


@pytest.mark.parametrize("names, found", [(["g++", "clang++"], "g++"), (["clang++"], "clang++")])
def test_the_compiler_is_cxx_or_else_the_first_there_is(tmp_path, monkeypatch, names, found):
    for name in names:
        write_script(tmp_path / name, "exit 0")
    wanted = write_script(tmp_path / "wanted", "exit 0")
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CXX", raising=False)
    assert find_compiler() == [str(tmp_path / found)]
    monkeypatch.setenv("CXX", str(wanted))
    assert find_compiler() == [str(wanted)]
    monkeypatch.setenv("CXX", f"{wanted} -pipe")
    assert find_compiler() == [str(wanted), "-pipe"]


@pytest.mark.parametrize(
    "output, line",
    [
        ("echo 'In file included from kernels.cpp' >&2; echo '  x.h:1:1: fatal error: no x' >&2", "no x"),
        ("echo 'killed by signal' >&2; echo 'sorry' >&2", "killed by signal"),
        ("", "no output"),
    ],
)
def test_a_compiler_that_fails_is_quoted_by_its_error_line(tmp_path, monkeypatch, output, line):
    monkeypatch.setenv("CXX", str(write_script(tmp_path / "compiler", f"{output}\nexit 1")))
    assert refusal(tmp_path / "kernels.so").endswith(line)
