"""Plans and manifests: they come back equal, keep their old files readable, and refuse what cannot be.

Run as a script (`python -m tests.yggrt.test_plan`) it writes the fixtures of the current format version. Once a version
has been released its fixtures stay as they are, and a change of the fields needs the next version.
"""

import dataclasses
import math
import random
import struct
import time
import zlib
from pathlib import Path

import msgpack
import numpy as np
import pytest

from tests.yggrt.test_schedule import overlapped
from yggrt import plan as plans
from yggrt import wire
from yggrt.artifacts import DEPTH_UNITS, LOG_Q_MIN, LayerLayout, StepLimits
from yggrt.depth import DepthNetwork
from yggrt.errors import BundleFormatError, PlanFormatError
from yggrt.latency import LatencyPoint
from yggrt.plan import (
    AcceptanceTable,
    Artifact,
    BundleFile,
    CalibrationRecord,
    DepthFigures,
    DraftGraph,
    HostSeconds,
    Manifest,
    ModelIdentity,
    ModelLayout,
    Plan,
    Prediction,
    Provenance,
    SampledPolicy,
    ScheduleStudy,
    StageTime,
    TreePolicy,
    TriedSchedule,
    identity_table,
)
from yggrt.sampling import GenerationSettings
from yggrt.schedule import COMPILED, STAGES, sequential_schedule
from yggrt.text import TextSpec
from yggrt.tree import TreeShape

FIXTURES = Path(__file__).parent.parent / "fixtures"
SHA256 = "0123456789abcdef" * 4


def sample_network() -> DepthNetwork:
    """Weights that no rounding leaves as they are."""
    chance = np.random.default_rng(0)
    first = chance.normal(size=(577, DEPTH_UNITS)).astype(np.float32)
    second = chance.normal(size=(DEPTH_UNITS + 1, 3)).astype(np.float32)
    return DepthNetwork.of_arrays((0, 2, 4), (1, 5, 9), first, second)


def sample_study() -> ScheduleStudy:
    """Of two schedules."""
    times = []
    for ahead in (False, True):
        times += [StageTime(stage, cores, None, ahead, 0.001 * cores) for stage in COMPILED for cores in (1, 2)]
        times += [StageTime(stage, 0, None, ahead, 0.00002) for stage in STAGES if stage not in COMPILED]
    tried = (
        TriedSchedule(overlapped(), 2.5, 0.0131, 0.0133, 0.0002),
        TriedSchedule(sequential_schedule(2, depth=True), 2.5, 0.0135, 0.0136, 0.0001),
    )
    return ScheduleStudy(tuple(times), 0.00005, 0.31, 0.12, tried)


def sample_plan() -> Plan:
    """A plan that uses every field of the current format version."""
    return Plan(
        sku="cpu-x86_64-avx512_bf16-2c",
        target="cpu",
        dtype="bfloat16",
        num_threads=2,
        max_context=2048,
        drafter=ModelIdentity("small", "LlamaForCausalLM", SHA256, "bfloat16", 49152, 2048, 2, 192, 3, 64),
        verifier=ModelIdentity("large", "LlamaForCausalLM", SHA256, "bfloat16", 49280, 8192, 30, 576, 3, 64),
        policy=TreePolicy(8, (0, 2, 4), (4, 8, 16), 8, (0, 1, 2, 3, 4, 5, 6, 7, 49151), TreeShape(8, 4, 16)),
        schedule=overlapped(),
        schedule_study=sample_study(),
        acceptance_table=identity_table(8, num_knots=5),
        copied_log_a=(-1.5, -0.7, -0.1),
        plain_width=4,
        draft_graphs=(DraftGraph(2, False, 0.004, 0.0041), DraftGraph(4, True, 0.0084, 0.0071)),
        curves=(
            LatencyPoint("verify", 4, 0, 128, 0.0144, 0.0003),
            LatencyPoint("verify", 16, 0, 128, 0.0225, 0.0004),
            LatencyPoint("draft", 8, 1, 128, 0.0021, 0.0),
            LatencyPoint("draft", 8, 4, 128, 0.0081, 0.0002),
        ),
        host=HostSeconds(plain_s=0.0002, speculative_s=0.0006),
        token_s=0.0075,
        depth_network=sample_network(),
        depth_figures=DepthFigures(4, 1.5, 1.55, 1.6, 1.8, 2.61, 2.58),
        sampled=tuple(
            SampledPolicy(
                temperature,
                chosen,
                draws,
                TreeShape(8, 2, widths[-1]),
                widths,
                8,
                identity_table(8, num_knots=5),
                () if draws else (-2.0, -0.2),
                HostSeconds(0.0003, 0.0009),
                0.009,
                Prediction(0.0095, 0.015, 2.1),
            )
            for temperature, chosen, draws, widths in [
                (0.6, False, True, (8,)),
                (0.6, True, False, (4, 8)),
                (1.0, True, True, (4,)),
            ]
        ),  # fmt: skip
        calibration=CalibrationRecord("built-in", SHA256, 60, 7680),
        prediction=Prediction(tpot_s=0.008, plain_tpot_s=0.015, tokens_per_iteration=2.5),
        provenance=Provenance("0.1.0", "2.14.1+cpu", "2025-11-29T22:33:00+00:00"),
    )


def sample_manifest() -> Manifest:
    """A manifest that uses every field of the current format version."""
    limits = StepLimits(
        kv_rows=2100, max_width=64, max_moves=16, max_nodes=33, pool_size=24, num_children=8, num_drawn=32, num_knots=33
    )
    full, sliding = LayerLayout(3, 64, 64, None), LayerLayout(1, 32, 48, 512)
    return Manifest(
        step_abi_version=5,
        torch_version="2.14.1",
        target="cpu",
        architecture="x86_64",
        instruction_set=("avx2", "avx512f", "avx512_bf16"),
        sku="cpu-x86_64-avx512_bf16-2c",
        num_threads=2,
        dtype="bfloat16",
        max_context=2048,
        drafter=ModelLayout(SHA256, 49152, 192, 2048, (full, full)),
        verifier=ModelLayout(SHA256, 49280, 576, 8192, (sliding, full)),
        artifacts=(
            Artifact("verify", "verify.pt2", 3_780_000, SHA256, limits, "verify.weights"),
            Artifact("draft", "draft.pt2", 2**33, SHA256, limits, "draft.weights"),
            Artifact("draft.d4", "draft.d4.pt2", 3_400_000, SHA256, limits, "draft.weights"),
        ),
        files=(
            BundleFile("plan.ygg", 900, SHA256),
            BundleFile("tokenizer.json", 2_100_000, SHA256),
            BundleFile("kernels.so", 107_000, SHA256),
            BundleFile("verify.weights", 98_000_000, SHA256),
            BundleFile("draft.weights", 28_000_000, SHA256),
        ),
        driver="",
        kernels="kernels.so",
        text=TextSpec("{{ messages[0].content }}", "<s>", "</s>", None, None, (0, 2)),
        generation=GenerationSettings(0.7, 20, 0.8, 0.0, 1.05, ("no_repeat_ngram_size=3",)),
    )


KINDS = [
    pytest.param(plans.encode_plan, plans.decode_plan, sample_plan, PlanFormatError, id="plan"),
    pytest.param(plans.encode_manifest, plans.decode_manifest, sample_manifest, BundleFormatError, id="manifest"),
]


@pytest.mark.field(35)
@pytest.mark.parametrize("encode, decode, sample, error", KINDS)
def test_a_file_comes_back_equal_and_its_bytes_are_always_the_same(encode, decode, sample, error):
    assert decode(encode(sample())) == sample()
    assert encode(decode(encode(sample()))) == encode(sample())


def test_what_was_not_measured_may_be_absent():
    absent = dict.fromkeys(("prediction", "calibration", "token_s", "depth_network", "depth_figures"))
    absent["sampled"] = ()
    schedule = sequential_schedule(2)
    bare = dataclasses.replace(sample_plan(), curves=(), schedule=schedule, schedule_study=None, **absent)
    assert plans.decode_plan(plans.encode_plan(bare)) == bare


@pytest.mark.field(35)
@pytest.mark.parametrize("encode, decode, sample, error", KINDS)
def test_every_truncation_and_bit_flip_gives_only_the_formats_error(encode, decode, sample, error):
    data = encode(sample())
    rng = random.Random(0)
    started = time.monotonic()
    for _ in range(1000):
        with pytest.raises(error):
            decode(data[: rng.randrange(len(data))])
        flipped = bytearray(data)
        flipped[rng.randrange(len(data))] ^= 1 << rng.randrange(8)
        with pytest.raises(error):
            decode(bytes(flipped))
    assert time.monotonic() - started < 10


@pytest.mark.parametrize("encode, decode, sample, error", KINDS)
def test_damage_under_a_right_checksum_gives_a_valid_value_or_the_formats_error(encode, decode, sample, error):
    data = encode(sample())
    rng = random.Random(1)
    for _ in range(1000):
        body = bytearray(data[24:])
        body[rng.randrange(len(body))] ^= 1 << rng.randrange(8)
        if rng.random() < 0.2:
            del body[rng.randrange(len(body)) :]
        try:
            value = decode(with_body(data, bytes(body)))
        except error:
            continue
        assert decode(encode(value)) == value


def with_body(data: bytes, body: bytes) -> bytes:
    """The same file with another body and a checksum that fits."""
    header = data[:12] + struct.pack("<Q", len(body))
    return header + struct.pack("<I", zlib.crc32(body, zlib.crc32(header))) + body


def edited(data: bytes, path: str, value: object) -> bytes:
    """The file somebody gets who edits one field by hand; path is like "policy.draft_width" or "curves.0.width"."""
    tree = msgpack.unpackb(data[24:])
    *parents, last = [int(part) if part.isdigit() else part for part in path.split(".")]
    node = tree
    for part in parents:
        node = node[part]
    node[last] = value
    return with_body(data, msgpack.packb(tree))


@pytest.mark.field(31)
@pytest.mark.parametrize(
    "path, value, message",
    [
        ("target", "tpu", "unknown target"),
        ("dtype", "int4", "unknown dtype"),
        ("sku", "", "SKU"),
        ("num_threads", 0, "num_threads"),
        ("max_context", 0, "max_context"),
        ("max_context", 8193, "verifier's context"),
        ("plain_width", 0, "plain_width"),
        ("draft_graphs.0.depth", 3, "not on the menu"),
        ("draft_graphs.0.depth", 4, "ascending"),
        ("draft_graphs.1.fused_s", 0.0, "above 0"),
        ("drafter.fingerprint", "abc", "sha256"),
        ("drafter.num_layers", 0, "num_layers"),
        ("drafter.vocab_size", 49151, "draft_vocabulary holds 49151"),
        ("verifier.name", "", "name"),
        ("policy.draft_width", 0, "widths start at 1"),
        ("policy.draft_width", 4, "default shape"),
        ("policy.draft_depths", [], "draft_depths"),
        ("policy.draft_depths", [4, 2], "ascending"),
        ("policy.draft_depths", [2, 2, 4], "ascending"),
        ("policy.draft_depths", [-1, 4], "ascending"),
        ("policy.draft_depths", [0, 2], "exceeds|menu"),
        ("policy.verify_widths", [0, 16], "verify_widths"),
        ("policy.verify_widths", [16, 34], "exceeds the 33 nodes"),
        ("policy.verify_widths", [4, 8], "menu of verify widths"),
        ("policy.children_per_node", 0, "children_per_node"),
        ("policy.children_per_node", 9, "exceeds the 8 ranks"),
        ("policy.children_per_node", 10, "exceeds the 9 tokens"),
        ("policy.draft_vocabulary", [], "draft_vocabulary"),
        ("policy.draft_vocabulary", [1, 1, 2, 3, 4, 5, 6, 7], "ascending"),
        ("policy.draft_vocabulary", [-1, 1, 2, 3, 4, 5, 6, 7], "ascending"),
        ("policy.default_shape.verify_width", 34, "exceeds the 33 nodes"),
        ("policy.default_shape.draft_depth", 3, "menu"),
        ("acceptance_table.log_a.0", 0.1, "not the log of a chance"),
        ("acceptance_table.log_a.0", math.nan, "finite"),
        ("acceptance_table.log_a.0", -math.inf, "finite"),
        ("acceptance_table.log_a", [0.0] * 39, "39 values instead of 8 ranks \\* 5 knots"),
        ("acceptance_table.num_knots", 1, "2 knots"),
        ("copied_log_a.0", 0.0, "not the log of a chance below 1"),
        ("sampled.1.copied_log_a.0", 0.0, "not the log of a chance below 1"),
        ("sampled.0.copied_log_a", [-1.0], "trees that are drawn"),
        ("copied_log_a.0", math.nan, "finite"),
        ("copied_log_a.0", -math.inf, "finite"),
        ("acceptance_table.log_q_min", 0.0, "below 0"),
        ("acceptance_table.log_q_min", -16.0, "the draft pass at"),
        ("schedule.stages", [], "lacks the stage head, grow, prune, verify, accept, move, emit"),
        ("schedule.stages.0.name", "sleep", "unknown stage"),
        ("schedule.stages.0.name", "verify", "names a stage twice"),
        ("schedule.stages.0.lane", 3, "stage head is on lane 3; there are 3"),
        ("schedule.stages.0.lane", 1, "stage grow may run before head"),
        ("schedule.stages.0.lag", 1, "0 is accepted, for emit 1 too"),
        ("schedule.stages.0.after", ["accept"], "in a circle"),
        ("schedule.stages.1.after", ["guess"], "which the schedule does not have"),
        ("schedule.stages.5.after", [], "stage move may run before"),
        ("schedule.lanes", [2, 1, 0], "lanes have 3 cores, the plan 2 threads"),
        ("schedule.lanes", [1, 0, 1], "its lane has no cores"),
        ("schedule.lanes", [], "at least one lane"),
        ("schedule.lanes", [1, 1, 0, 0], "lane 3 has no stage"),
        ("schedule.verify_width", 5, "not on the menu"),
        ("schedule.verify_width", 8, "not among those that were tried"),
        ("schedule.verify_width", 0, "must be at least 1"),
        ("schedule_study.times", [], "has no time for the stage"),
        ("schedule_study.times.0.seconds", -1.0, "stage head"),
        ("schedule_study.tail_hits", 1.5, "not shares"),
        ("schedule_study.handoff_s", -1.0, "at least 0"),
        ("schedule_study.tried.0.measured_s", 0.0, "above 0"),
        ("schedule_study.tried.0.tokens_per_iteration", 0.5, "at least 1 comes"),
        ("depth_network", None, "only there"),
        ("curves.0.role", "guess", "unknown role"),
        ("curves.0.width", 0, "width 0"),
        ("curves.0.seconds", 0.0, "latency of 0"),
        ("curves.0.spread_s", -1.0, "spread"),
        ("curves.0.depth", 2, "verify at width 4, depth 2"),
        ("curves.1.width", 12, "the verify width 16 is on the menu, the curves end at 12"),
        ("host.plain_s", -0.1, "start at 0"),
        ("token_s", 0.0, "must be above 0"),
        ("token_s", None, "needs token_s"),
        ("depth_network.depths", [0, 3, 4], "not on the menu"),
        ("depth_network.depths", [2, 4], "ascending from 0"),
        ("depth_network.depths", [0, 4, 2], "ascending from 0"),
        ("depth_network.depths", [], "ascending from 0"),
        ("depth_network.verify_widths", [1, 5], "one from 1 up for each depth"),
        ("depth_network.verify_widths", [1, 5, 0], "one from 1 up for each depth"),
        ("depth_network.hidden_size", 0, "must be at least 1"),
        ("depth_network.hidden_size", 576 + 1, "layer first has"),
        ("depth_network.first", b"", "layer first has 0 bytes"),
        ("depth_network.second", b"\xff" * (33 * 8 * 4), "not finite"),
        ("verifier.hidden_size", 64, "reads 576 features, the verifier gives 64"),
        ("depth_figures.oracle", 0.0, "above 0"),
        ("depth_figures.fixed_depth", -1, "fixed depth of -1"),
        ("prediction.tpot_s", 0.0, "above 0"),
        ("prediction.tokens_per_iteration", 0.9, "at least 1"),
        ("calibration.num_prompts", 0, "at least one"),
        ("calibration.sha256", SHA256.upper(), "lower-case hex"),
        ("provenance.created", "yesterday", "ISO 8601"),
        ("provenance.created", "2025-11-29T22:33:00", "ISO 8601"),
    ],
)
def test_a_plan_edited_into_the_impossible_is_refused_and_says_why(path, value, message):
    with pytest.raises(PlanFormatError, match=message):
        plans.decode_plan(edited(plans.encode_plan(sample_plan()), path, value))


@pytest.mark.parametrize(
    "path, value, message",
    [
        ("target", "tpu", "unknown target"),
        ("num_threads", 0, "num_threads"),
        ("architecture", "", "architecture"),
        ("max_context", 9000, "verifier's context"),
        ("drafter.fingerprint", "", "sha256"),
        ("drafter.vocab_size", 0, "sizes start at 1"),
        ("drafter.layers", [], "at least one layer"),
        ("drafter.layers.0.window", 0, "start at 1"),
        ("drafter.layers.0.num_heads", 0, "start at 1"),
        ("artifacts", [], "role verify"),
        ("artifacts.0.role", "prefill", "unknown artifact role"),
        ("artifacts.2.role", "draft.d0", "unknown artifact role"),
        ("artifacts.2.role", "draft", "two artifacts of one role"),
        ("artifacts.0.weights", "other.weights", "lack other.weights"),
        ("kernels", "", "files of the bundle lack"),
        ("artifacts.0.num_bytes", -1, "-1 bytes"),
        ("artifacts.0.limits.kv_rows", 0, "kv_rows"),
        ("files.0.file", "bundle.ygg", "lists itself"),
        ("files.0.file", "verify.pt2", "lists twice: verify.pt2"),
        ("files.0.digest", "0" * 63, "sha256"),
        ("text.eos_ids", [2, 0], "ascending"),
        ("text.eos_ids", [-1], "ascending"),
    ],
)
def test_a_manifest_edited_into_the_impossible_is_refused_and_says_why(path, value, message):
    with pytest.raises(BundleFormatError, match=message):
        plans.decode_manifest(edited(plans.encode_manifest(sample_manifest()), path, value))


@pytest.mark.field(34)
@pytest.mark.parametrize(
    "name",
    [
        "",
        ".",
        "..",
        "../x",
        "/etc/passwd",
        "a/b",
        "a\\b",
        "C:\\x",
        "a\0b",
        "a..b",
        ".hidden",
        "-o",
        "a\n",
        "a b",
        "ä",
        "a" * 201,
    ],
)
@pytest.mark.parametrize("place", ["artifacts.0.file", "files.0.file"])
def test_only_bare_file_names_are_accepted(place, name):
    with pytest.raises(BundleFormatError, match="not a bare file name"):
        plans.decode_manifest(edited(plans.encode_manifest(sample_manifest()), place, name))


def test_a_long_list_of_names_is_checked_quickly():
    many = tuple(BundleFile(f"weights-{index}.safetensors", 1, SHA256) for index in range(20_000))
    files = sample_manifest().files + many
    started = time.monotonic()
    plans.decode_manifest(plans.encode_manifest(dataclasses.replace(sample_manifest(), files=files)))
    assert time.monotonic() - started < 5


def test_a_plan_may_decide_against_speculation():
    policy = TreePolicy(1, (0,), (1,), 1, None, TreeShape(1, 0, 1))
    assert policy.largest_shape == TreeShape(1, 0, 1)


def test_a_chain_is_a_tree_of_width_one():
    assert TreePolicy(1, (4,), (5,), 1, None, TreeShape(1, 4, 5)).largest_shape.capacity == 5


def test_the_identity_table_gives_q_at_every_rank_and_between_knots():
    table = identity_table(8, num_knots=33)
    rng = random.Random(0)
    for _ in range(500):
        log_q = rng.uniform(LOG_Q_MIN, 0)
        assert table.log_acceptance(rng.randrange(8), log_q) == pytest.approx(log_q, abs=1e-12)
    assert table.log_acceptance(0, 0.0) == 0.0
    assert table.log_acceptance(0, -1000.0) == table.log_acceptance(0, LOG_Q_MIN) == pytest.approx(LOG_Q_MIN)


def test_a_table_is_linear_between_its_knots_and_has_a_row_for_each_rank():
    table = AcceptanceTable(2, 3, -4.0, (-3.0, -1.0, -0.5, -9.0, -8.0, -7.0))
    assert [table.log_acceptance(0, log_q) for log_q in (-4.0, -3.0, -2.0, -1.0, 0.0)] == [
        -3.0,
        -2.0,
        -1.0,
        -0.75,
        -0.5,
    ]
    assert table.log_acceptance(1, -2.0) == -8.0
    for rank in (-1, 2):
        with pytest.raises(ValueError, match="rank"):
            table.log_acceptance(rank, -1.0)


def test_files_are_written_atomically_and_read_by_path(tmp_path: Path):
    plans.write_plan(tmp_path / plans.PLAN_FILE, sample_plan())
    plans.write_manifest(tmp_path, sample_manifest())
    assert plans.read_plan(tmp_path / plans.PLAN_FILE) == sample_plan()
    assert plans.read_manifest(tmp_path) == sample_manifest()
    assert sorted(entry.name for entry in tmp_path.iterdir()) == ["bundle.ygg", "plan.ygg"]


def test_a_folder_without_a_manifest_is_not_a_bundle(tmp_path: Path):
    for folder in (tmp_path, tmp_path / "missing"):
        with pytest.raises(BundleFormatError, match="is not a bundle: it has no bundle.ygg. Build one with yggc build"):
            plans.read_manifest(folder)


def test_a_plan_is_not_taken_for_a_manifest():
    with pytest.raises(BundleFormatError, match="not a bundle"):
        plans.decode_manifest(plans.encode_plan(sample_plan()))


def test_every_readable_version_has_a_fixture_that_is_still_read():
    for version in range(plans.OLDEST_READABLE_VERSION, plans.FORMAT_VERSION + 1):
        plan = plans.read_plan(FIXTURES / f"v{version}.plan.ygg")
        manifest = wire.read_file(plans.MANIFEST_FORMAT, Manifest, FIXTURES / f"v{version}.bundle.ygg")
        if version == plans.FORMAT_VERSION:
            assert (plan, manifest) == (sample_plan(), sample_manifest())


def test_files_of_older_versions_are_refused_by_number():
    for version in range(1, plans.OLDEST_READABLE_VERSION):
        with pytest.raises(PlanFormatError, match=f"format version {version}; this runtime reads"):
            plans.read_plan(FIXTURES / f"v{version}.plan.ygg")
        with pytest.raises(BundleFormatError, match=f"format version {version}; this runtime reads"):
            wire.read_file(plans.MANIFEST_FORMAT, Manifest, FIXTURES / f"v{version}.bundle.ygg")


def test_a_version_that_is_not_readable_is_refused_by_number():
    for version in (0, plans.FORMAT_VERSION + 1):
        data = bytearray(plans.encode_plan(sample_plan()))
        data[8:12] = struct.pack("<I", version)
        with pytest.raises(
            PlanFormatError, match=f"format version {version}; this runtime reads {plans.OLDEST_READABLE_VERSION} to"
        ):
            plans.decode_plan(bytes(data))


if __name__ == "__main__":
    FIXTURES.mkdir(exist_ok=True)
    plans.write_plan(FIXTURES / f"v{plans.FORMAT_VERSION}.plan.ygg", sample_plan())
    (FIXTURES / f"v{plans.FORMAT_VERSION}.bundle.ygg").write_bytes(plans.encode_manifest(sample_manifest()))
