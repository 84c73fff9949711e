"""What is compiled for a GPU, as far as that goes without one.

The same values in torch's own operators, traced and, for the CPU in a GPU's stead, compiled; weights once; sizes.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch
from safetensors.torch import save_file
from torch.export import ExportedProgram

from tests import toy
from tests.test_lossless import prompt_of
from tests.yggc.checkpoint_makers import write_pair
from tests.yggc.test_lowering import (
    FAMILIES,
    KEPT,
    LIMITS,
    SHAPE,
    assert_close,
    draft_arguments,
    verify_arguments,
)
from tests.yggrt.test_target import pretend_gpu
from yggc import build, profile, steps
from yggc.cli import main
from yggc.config import COMPILE_OPTIONS, DRAFT_WIDTHS, MEASURED, SIZES, BuildOptions
from yggc.export import (
    StepModule,
    allocate_kv,
    compile_step,
    constants,
    draft_pass,
    eager_run,
    export_step,
    find_cuda_headers,
    fused_draft,
    nest_inputs,
    verify_step,
)
from yggc.graphs import TORCH, best_children, grouped_attention, largest_first, sdpa
from yggc.kernels import OPERATORS
from yggc.lowering import merge_products
from yggc.profile import Timing
from yggc.progress import Progress
from yggc.steps import CompiledStep, WantedStep, step_limits
from yggrt.artifacts import MASK_VALUE, Step, load_package, load_weights
from yggrt.engine import Engine
from yggrt.errors import ArtifactError, BuildError
from yggrt.executor import Decoder
from yggrt.kvcache import KvCache
from yggrt.plan import TreePolicy
from yggrt.tree import TreeShape

CPU = torch.device("cpu")


@pytest.mark.parametrize("heads, kv_heads, value_dim", [(4, 4, 8), (6, 2, 8), (4, 1, 12)])
def test_attention_by_groups_is_attention(heads, kv_heads, value_dim):
    torch.manual_seed(0)
    for width, extent in ((1, 9), (5, 33)):
        query, key = torch.randn(1, heads, width, 8), torch.randn(1, kv_heads, extent, 8)
        value = torch.randn(1, kv_heads, extent, value_dim)
        mask = torch.where(torch.rand(1, 1, width, extent) < 0.5, 0.0, MASK_VALUE)
        mask[..., 0] = 0
        for scale in (None, 0.3):
            found = grouped_attention(query, key, value, mask, scale)
            torch.testing.assert_close(found, sdpa(query, key, value, mask, scale), rtol=1e-5, atol=1e-6)
            assert found.shape == (1, heads, width, value_dim)


def test_children_and_order_are_the_kernels():
    torch.manual_seed(0)
    logits = torch.randn(5, 300)
    logits[1, 7], logits[2, 9], logits[3, 11] = torch.inf, torch.nan, -torch.inf
    for found, expected in zip(best_children(logits, 8), OPERATORS.children(logits, 8), strict=True):
        torch.testing.assert_close(found, expected)
    logits = torch.randn(3, 20000).round(decimals=1)  # with many equals, across blocks of blocks
    logits[1] = 0.5
    for found, expected in zip(best_children(logits, 32), OPERATORS.children(logits, 32), strict=True):
        torch.testing.assert_close(found, expected)
    values = torch.randn(50).round(decimals=1)
    assert torch.equal(largest_first(values), OPERATORS.order(values))


def traced(step: StepModule) -> tuple[StepModule, ExportedProgram]:
    """A step and its program as it is compiled for a GPU, in which no operator is ours."""
    program = merge_products(export_step(step))
    assert not [node for node in program.graph_module.graph.nodes if "yggc" in str(node.target)]
    return step, program


@pytest.mark.parametrize("width", [None, 1, 5])
@pytest.mark.parametrize("family", FAMILIES)
def test_traced_steps_compute_what_the_cpus_do(family, width):
    torch.manual_seed(3)
    model = FAMILIES[family]().eval()
    own = verify_step(copy.deepcopy(model), toy.VOCAB_SIZE, LIMITS)
    step, program = traced(verify_step(model, toy.VOCAB_SIZE, LIMITS, width, TORCH))
    assert step.role == ("verify" if width is None else f"verify.w{width}")
    for rows, extent in ((width or 2, 24), (width or 17, LIMITS.kv_rows - 1)):
        flat = verify_arguments(step, rows, extent)
        kept = [torch.randn_like(buffer) for buffer in allocate_kv(step)]
        results = []
        for run in (own.module, step.module, program.module()):
            buffers = copy.deepcopy(kept)
            with torch.no_grad():
                results.append([*run(*nest_inputs(step, copy.deepcopy(flat), buffers)), *buffers])
        for found in results[1:]:
            assert_close(found, results[0], 1e-5)


@pytest.mark.parametrize("vocabulary", [None, KEPT])
def test_traced_drafts_grow_the_cpus_trees(vocabulary):
    model = toy.make_llama(6, num_hidden_layers=1, tie_word_embeddings=True)
    expected_step = draft_pass(copy.deepcopy(model), toy.VOCAB_SIZE, LIMITS, vocabulary)
    one = draft_pass(model, toy.VOCAB_SIZE, LIMITS, vocabulary, TORCH)
    for step in (one, fused_draft(one, SHAPE.draft_width, SHAPE.draft_depth)):
        _, program = traced(step)
        torch.manual_seed(8)
        flat = draft_arguments(step, LIMITS.kv_rows - 1)
        buffers = allocate_kv(step)
        with torch.no_grad():
            outputs = program.module()(*nest_inputs(step, flat, copy.deepcopy(buffers)))
            own = expected_step
            if step is not one:
                own = fused_draft(expected_step, SHAPE.draft_width, SHAPE.draft_depth)
            expected = own.module(*nest_inputs(own, flat, copy.deepcopy(buffers)))
        assert_close(outputs, expected, 1e-5)


@pytest.mark.parametrize("kind", ["always", "sometimes"])
def test_an_engine_over_such_steps_says_what_the_model_says(verifier, kind):
    shape = TreeShape(3, 3, 7)
    limits = toy.make_limits(shape)
    verify = verify_step(copy.deepcopy(verifier), toy.VOCAB_SIZE, limits, operators=TORCH)
    drafter = copy.deepcopy(toy.make_drafter(kind, verifier))
    draft = draft_pass(drafter, toy.VOCAB_SIZE, limits, operators=TORCH)
    decoder = Decoder(
        Step("verify", eager_run(verify), verify.inputs, limits),
        Step("draft", eager_run(draft), draft.inputs, limits),
        {},
        3,
        KvCache(verify.layouts, limits, verify.dtype),
        KvCache(draft.layouts, limits, draft.dtype),
        toy.table(limits),
        toy.MAX_CONTEXT,
        1,
    )
    engine = Engine(decoder, shape, None, frozenset(), toy.VOCAB_SIZE, 512, torch.get_num_threads())
    prompt = prompt_of(8)
    assert list(engine.generate(prompt, max_new_tokens=40).token_ids) == toy.hf_greedy(verifier, prompt, 40)


@pytest.mark.parametrize("is_tied", [True, False])
def test_products_of_one_input_are_one_product_in_the_parameters_memory(is_tied):
    model = toy.make_llama(1, num_hidden_layers=3, tie_word_embeddings=is_tied)
    num_bytes = sum(each.numel() * each.element_size() for each in model.parameters())
    one = draft_pass(model, toy.VOCAB_SIZE, LIMITS, operators=TORCH)
    names = []
    for step, passes in ((one, 1), (fused_draft(one, SHAPE.draft_width, SHAPE.draft_depth), SHAPE.draft_depth)):
        _, program = traced(step)
        linears = [node for node in program.graph_module.graph.nodes if "linear" in str(node.target)]
        assert len(linears) == passes * (3 * 4 + 1)  # of a layer: q, k and v; o; gate and up; down
        tensors, aliases = constants(program)
        names.append({name for name, each in tensors.items() if each.dim() == 2})
        assert not aliases
        assert abs(sum(each.numel() * each.element_size() for each in tensors.values()) - num_bytes) <= 0.01 * num_bytes
        kept = {each.untyped_storage().data_ptr() for each in tensors.values()}
        assert {each.untyped_storage().data_ptr() for each in model.parameters()} <= kept
    assert names[0] == names[1]


def test_tied_weights_are_kept_once_and_come_back_under_both_names(tmp_path):
    model = toy.make_llama(1, tie_word_embeddings=True)
    unique = {parameter.data_ptr(): parameter.numel() * 4 for parameter in model.parameters()}
    program = export_step(verify_step(model, toy.VOCAB_SIZE, LIMITS, operators=TORCH))
    tensors, aliases = constants(program)
    assert aliases and sum(each.numel() * each.element_size() for each in tensors.values()) <= 1.1 * sum(
        unique.values()
    )
    save_file(tensors, tmp_path / "weights", aliases)
    loaded = load_weights(tmp_path / "weights")
    assert set(loaded) == {name for name, value in {**program.state_dict, **program.constants}.items()}
    for name, own in aliases.items():
        assert loaded[name].data_ptr() == loaded[own].data_ptr()


def test_a_compiled_step_of_fixed_width_uses_the_weights_of_the_other(tmp_path):
    """The compiler sees nothing but torch, and the packages nothing but names."""
    model = toy.make_llama(1, tie_word_embeddings=True, num_hidden_layers=1)
    _, program = traced(verify_step(copy.deepcopy(model), toy.VOCAB_SIZE, LIMITS, None, TORCH))
    tensors, aliases = constants(program)
    save_file(tensors, tmp_path / "weights", aliases)
    step, program = traced(verify_step(model, toy.VOCAB_SIZE, LIMITS, 4, TORCH))
    compile_step(program, tmp_path / "step.pt2", 1, tmp_path / "scratch", CPU)
    run = load_package(tmp_path / "step.pt2", load_weights(tmp_path / "weights"))
    torch.manual_seed(0)
    for extent in (20, LIMITS.kv_rows - 1):
        flat = verify_arguments(step, 4, extent)
        kept = [torch.randn_like(buffer) for buffer in allocate_kv(step)]
        results = []
        for call in (run, eager_run(step)):
            buffers = copy.deepcopy(kept)
            results.append([*call([*copy.deepcopy(flat), *buffers]), *buffers])
        assert_close(results[0], results[1], 1e-5)


def test_what_is_compiled_for_a_gpu_holds_the_papers_best_tree():
    limits = step_limits("cuda", 8192, 8192, 32000)
    assert limits.max_nodes == 65 and limits.num_children == 16 and limits.max_moves >= 8
    assert set(SIZES["cuda"].fixed_widths) == {1, 2, 4, 8, 16, 32, 64}
    small = step_limits("cpu", 8192, 8192, 32000)
    assert small.max_nodes == 33 and small.num_children == 8 and max(DRAFT_WIDTHS) == 16


def test_dtypes_and_targets_of_a_build():
    assert BuildOptions("d", "v").dtype == "float32" and BuildOptions("d", "v", target="cuda:1").dtype == "bfloat16"
    assert BuildOptions("d", "v", target="cuda", dtype="float32").dtype == "float32"
    with pytest.raises(ValueError, match="target 'gpu': cpu, cuda or cuda:N is accepted"):
        BuildOptions("d", "v", target="gpu")


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a GPU")
@pytest.mark.parametrize("target", ["cuda", "cuda:1"])
def test_a_build_for_a_gpu_that_is_not_there_is_one_line(tmp_path, capsys, target):
    pair = ["--drafter", str(tmp_path), "--verifier", str(tmp_path)]
    assert main(["build", *pair, "--target", target]) == 1
    name = target if ":" in target else f"{target}:0"
    assert f"{name} was asked for; torch {torch.__version__} finds no CUDA device here" in capsys.readouterr().err


class PretendCompiler:
    """In place of `compile_steps` and of timing: what was asked for, and which options run fastest."""

    def __init__(self, monkeypatch, fastest: str) -> None:
        self.asked: list[WantedStep] = []
        self.tuned: list[str] = []
        self.fastest, self.wrong, self.unloadable = fastest, "", ""
        monkeypatch.setattr(build, "compile_steps", self.compile)
        monkeypatch.setattr(build, "PairLoader", lambda *_: SimpleNamespace(step=self.load))
        monkeypatch.setattr(build.Build, "_engine", lambda *_: SimpleNamespace(decoder=SimpleNamespace()))
        monkeypatch.setattr(profile, "Alternatives", self.beside)

    def compile(self, _cache, _progress, wanted, kernels):
        assert kernels is None
        self.asked.extend(wanted)
        return [
            CompiledStep(each.role, each.limits, each.vocabulary, each.entry / "step.pt2", None, (), 1)
            for each in wanted
        ]

    def load(self, step):
        options = {each.entry / "step.pt2": each.compile_options for each in self.asked}
        if options[step.package] == self.unloadable:
            raise ArtifactError("step.pt2 needs the constant 'packed'")
        return step

    def beside(self, _engine, role, alternatives):
        """With logits that are all but equal, those of one way excepted."""
        assert [step.role for step in alternatives.values()] == [role] * len(alternatives)
        assert len({step.package for step in alternatives.values()}) == len(alternatives)
        self.tuned.append(role)
        seconds = {name: 0.8 if name == self.fastest else 1.0 for name in alternatives}
        return SimpleNamespace(
            time=lambda: {name: Timing(each, 0.01) for name, each in seconds.items()},
            deviations=lambda: {name: 0.5 if name == self.wrong else 1e-3 for name in alternatives},
        )


@pytest.mark.parametrize("fastest", COMPILE_OPTIONS)
@pytest.mark.parametrize("given", [MEASURED, "max-autotune"])
def test_each_model_is_compiled_with_the_options_that_ran_one_of_its_steps_fastest(
    tmp_path, monkeypatch, capsys, fastest, given
):
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "cache"))
    drafter, verifier = write_pair(tmp_path)
    compiler = PretendCompiler(monkeypatch, fastest)
    made = build.Build(BuildOptions(str(drafter), str(verifier), target="cuda", compile_options=given), Progress())
    kept = [step.package for step in made.compiled]
    policy = TreePolicy(4, (0, 1, 2, 4), (1, 8), 8, None, TreeShape(4, 4, 8))
    monkeypatch.setattr(build.Build, "settled", SimpleNamespace(policy=policy))
    kept += [step.package for step in made.fused_steps]
    chosen = {each.role: each.compile_options for each in compiler.asked if each.entry / "step.pt2" in kept}
    expected = fastest if given == MEASURED else given
    assert {chosen[role] for role in chosen if "." in role} == {expected}
    assert {chosen["verify"], chosen["draft"]} == {"default"}
    assert compiler.tuned == (["verify.w8", "draft.d4"] if given == MEASURED else [])
    said = f"verify.w8 compiled with default {'800' if fastest == 'default' else '1000'}.000 ms"
    assert (said in capsys.readouterr().err) == (given == MEASURED)


def test_where_other_options_do_not_compile_the_default_ones_are_taken(tmp_path, monkeypatch):
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "cache"))
    drafter, verifier = write_pair(tmp_path)
    compiler = PretendCompiler(monkeypatch, "max-autotune")

    def fail(_cache, _progress, wanted, kernels):
        if any(step.compile_options != "default" for step in wanted):
            raise BuildError("no Triton here")
        return compiler.compile(_cache, _progress, wanted, kernels)

    monkeypatch.setattr(build, "compile_steps", fail)
    made = build.Build(BuildOptions(str(drafter), str(verifier), target="cuda"), Progress())
    assert [step.width for step in made.compiled if step.width] == list(SIZES["cuda"].fixed_widths)
    assert {each.compile_options for each in compiler.asked} == {"default"}
    assert any("no Triton here" in notice for notice in made.notices)


@pytest.mark.parametrize(
    "fault, said", [("wrong", "its logits are 50.0 % off"), ("unloadable", "it needs more than the model's weights")]
)
def test_what_other_options_made_is_not_used_where_it_is_wrong(tmp_path, monkeypatch, fault, said):
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "cache"))
    drafter, verifier = write_pair(tmp_path)
    compiler = PretendCompiler(monkeypatch, "max-autotune")
    setattr(compiler, fault, "max-autotune")
    made = build.Build(BuildOptions(str(drafter), str(verifier), target="cuda"), Progress())
    kept = [step.package for step in made.compiled]
    assert {each.compile_options for each in compiler.asked if each.entry / "step.pt2" in kept} == {"default"}
    assert any(said in notice for notice in made.notices)


def test_compile_options_reach_the_compiler(tmp_path, monkeypatch):
    seen = []
    monkeypatch.setattr(
        torch._inductor, "aoti_compile_and_package", lambda *_, inductor_configs, **__: seen.append(inductor_configs)
    )
    for name in COMPILE_OPTIONS:
        compile_step(None, tmp_path / "step.pt2", 1, tmp_path / "scratch", torch.device("cuda"), name)
    assert [each["max_autotune"] for each in seen] == [False, True, False]
    assert [each.get("coordinate_descent_tuning", False) for each in seen] == [False, False, True]
    assert not any(each["split_reductions"] for each in seen)  # with them verify.w1 does not compile on torch 2.11
    known = torch._inductor.config.get_config_copy()
    assert {name for each in seen for name in each} <= set(known)


def test_as_many_steps_are_compiled_at_a_time_as_the_gpu_has_room_for(tmp_path, monkeypatch):
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    monkeypatch.setattr(steps, "usable_cores", lambda: 16)
    monkeypatch.setattr("os.sysconf", lambda _: 2**20)
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "cache"))
    compiler = PretendCompiler(monkeypatch, "default")
    options = BuildOptions(*map(str, write_pair(tmp_path)), target="cuda", compile_options="default")
    _ = build.Build(options, Progress()).compiled
    wanted = [replace(step, weight_bytes=14 * 10**9) for step in compiler.asked]
    for free, together in ((10**9, 1), (24 * 10**9, 1), (40 * 10**9, 2), (200 * 10**9, 8)):
        monkeypatch.setattr("torch.cuda.mem_get_info", lambda _, free=free: (free, 2**38))
        assert steps._num_together(wanted) == together
    assert steps._num_together([replace(step, device="cpu") for step in wanted]) == 8


def test_a_build_for_a_gpu_without_cudas_headers_is_one_line(tmp_path, monkeypatch):
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr("torch.utils.cpp_extension.CUDA_HOME", str(tmp_path / "cuda"))
    drafter, verifier = write_pair(tmp_path)
    made = build.Build(BuildOptions(str(drafter), str(verifier), target="cuda", compile_options="default"), Progress())
    with pytest.raises(
        BuildError, match=r"no CUDA toolkit found .* name its folder in CUDA_HOME. Only building needs it"
    ):
        _ = made.compiled
    (tmp_path / "cuda" / "include").mkdir(parents=True)
    (tmp_path / "cuda" / "include" / "cuda.h").touch()
    assert find_cuda_headers() == tmp_path / "cuda" / "include"


@pytest.mark.parametrize(
    "given, message",
    [
        ({"target": "cuda", "compile_options": "fast"}, "'fast': measured, default, max-autotune, coordinate-descent"),
        ({"compile_options": "max-autotune"}, "for the CPU, whose hot loops are kernels of our own"),
    ],
)
def test_compile_options_that_are_not_known_or_not_for_this_target_are_refused(given, message):
    with pytest.raises(ValueError, match=message):
        BuildOptions("d", "v", **given)


def test_a_build_for_a_gpu_wants_every_width_and_depth_and_no_kernels(tmp_path, monkeypatch):
    """Which artifacts are asked for; compiling them needs the card."""
    pretend_gpu(monkeypatch, "NVIDIA H200", 9, 0)
    monkeypatch.setenv("YGG_CACHE", str(tmp_path / "cache"))
    drafter, verifier = write_pair(tmp_path)
    compiler = PretendCompiler(monkeypatch, "default")
    made = build.Build(BuildOptions(str(drafter), str(verifier), target="cuda:0"), Progress())
    widths = [f"verify.w{width}" for width in SIZES["cuda"].fixed_widths]
    assert [step.role for step in made.compiled if step.width is not None] == widths
    assert [step.role for step in made._with_verify(made.drafts[0])] == ["verify", "draft", *widths]
    shape = TreeShape(4, 4, 8)
    settled = SimpleNamespace(policy=TreePolicy(4, (0, 1, 2, 4), (1, 8), 8, None, shape))
    monkeypatch.setattr(build.Build, "settled", settled)  # with the depths that the network may ask for
    assert [step.depth for step in made.fused_steps] == [1, 2, 4]
    asked = compiler.asked
    assert {each.device for each in asked} == {"cuda:0"} and {each.dtype for each in asked} == {"bfloat16"}
    assert len({each.entry for each in asked}) == len({(each.role, each.compile_options) for each in asked})
    assert any("never been checked on nvidia-h200" in notice for notice in made.notices)
