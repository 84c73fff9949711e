#!/usr/bin/env bash
# Everything that needs a GPU, within 8 minutes and without a network: the tests, then a Llama-2-7B-shaped verifier and a
# 68M-shaped drafter with random weights. Figures go to $OUT/figures.json, the plan to plans/<sku>/.
# PYTHON names an interpreter with torch, transformers and pytest; wheels in $WHEELS fill in what it lacks (gguf, mostly).
set -u
cd "$(dirname "$0")/../.."
PYTHON=${PYTHON:-python3}
export OUT=${OUT:-gpu-check}
mkdir -p "$OUT"
scratch=$(mktemp -d)
trap 'rm -rf "$scratch"' EXIT
export YGG_CACHE=$scratch/cache PYTHONPATH=.:runtime:$scratch/packages PYTHONUNBUFFERED=1

for package in gguf msgpack networkx onnx jinja2 pytest; do
    "$PYTHON" -c "import $package" 2>/dev/null && continue
    "$PYTHON" -m pip install --quiet --no-deps --no-index --find-links "${WHEELS:-wheels}" --target "$scratch/packages" \
        "$package" || { echo "$package is missing: put its wheel into ${WHEELS:-wheels}/"; exit 1; }
done

failed=0  # what is interrupted still says what it found
timeout -s INT -k 5 235 "$PYTHON" -m pytest tests/gpu -q -rs --durations=5 -p no:cacheprovider 2>&1 | tee "$OUT/tests.log"
[ "${PIPESTATUS[0]}" = 0 ] || failed=1
timeout -s INT -k 5 230 "$PYTHON" tests/gpu/measure.py --json "$OUT/figures.json" --plans "${PLANS:-plans}" 2>&1 | tee "$OUT/measure.log"
[ "${PIPESTATUS[0]}" = 0 ] || failed=1
[ -d "${PLANS:-plans}" ] && cp -r "${PLANS:-plans}"/nvidia-* "$OUT/" 2>/dev/null
exit $failed
