"""The tokenizer of a GGUF file, rebuilt with the pre-tokenizer that the file names (`tokenizer.ggml.pre`).

Byte-level BPE only differs between families in how text is cut before merging, so an unknown name is refused: a guess
would encode most text right and some of it wrong.
"""

from dataclasses import dataclass

from tokenizers import (
    AddedToken,
    Regex,
    Tokenizer,
    decoders,
    models,
    normalizers,
    pre_tokenizers,
    processors,
)

from yggc.gguf_file import GgufFile
from yggrt.errors import CheckpointError

NORMAL, UNKNOWN, CONTROL, USER_DEFINED, UNUSED, BYTE = 1, 2, 3, 4, 5, 6

_CONTRACTIONS = r"(?i:'s|'t|'re|'ve|'m|'ll|'d)"
_REST = r" ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_LLAMA3 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}{{1,3}}|{_REST}"
_QWEN2 = rf"{_CONTRACTIONS}|[^\r\n\p{{L}}\p{{N}}]?\p{{L}}+|\p{{N}}|{_REST}"
_UPPER, _LOWER = r"[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]", r"[\p{Ll}\p{Lm}\p{Lo}\p{M}]"
_REST_WITH_SLASH = r" ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
_TEKKEN = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*|\p{{N}}|{_REST_WITH_SLASH}"
)
_GPT4O = (
    rf"[^\r\n\p{{L}}\p{{N}}]?{_UPPER}*{_LOWER}+{_CONTRACTIONS}?|[^\r\n\p{{L}}\p{{N}}]?{_UPPER}+{_LOWER}*{_CONTRACTIONS}?"
    rf"|\p{{N}}{{1,3}}|{_REST_WITH_SLASH}"
)


@dataclass(frozen=True, slots=True)
class PreTokenizer:
    """How one family cuts text before merging.

    regex:         pieces are its matches; None: GPT-2's, which the byte-level pre-tokenizer has built in.
    single_digits: every digit is first cut off on its own.
    ignore_merges: a piece that is a token is not merged up from its bytes.
    composed:      text is normalised to NFC first.
    adds_bos:      the default where the file has no `add_bos_token`.
    """

    regex: str | None = None
    single_digits: bool = False
    ignore_merges: bool = False
    composed: bool = False
    adds_bos: bool = False


_GPT2_CUT = PreTokenizer()
_DIGITS_CUT = PreTokenizer(single_digits=True)
_LLAMA3_CUT = PreTokenizer(_LLAMA3, ignore_merges=True, adds_bos=True)
PRE_TOKENIZERS = {
    "default": _GPT2_CUT,
    "gpt-2": _GPT2_CUT,
    "mpt": _GPT2_CUT,
    "olmo": _GPT2_CUT,
    "phi-2": _GPT2_CUT,
    "starcoder": _DIGITS_CUT,
    "refact": _DIGITS_CUT,
    "smollm": _DIGITS_CUT,
    "command-r": _DIGITS_CUT,
    "llama3": _LLAMA3_CUT,
    "llama-v3": _LLAMA3_CUT,
    "llama-bpe": _LLAMA3_CUT,
    "falcon3": _LLAMA3_CUT,
    "dbrx": PreTokenizer(_LLAMA3),
    "smaug-bpe": PreTokenizer(_LLAMA3),
    "qwen2": PreTokenizer(_QWEN2, composed=True),
    "deepseek-r1-qwen": PreTokenizer(_QWEN2),
    "tekken": PreTokenizer(_TEKKEN, ignore_merges=True, adds_bos=True),
    "gpt-4o": PreTokenizer(_GPT4O),
}


def gguf_tokenizer(file: GgufFile) -> Tokenizer:
    """Builds the fast tokenizer that the metadata describes.

    Raises CheckpointError for a kind of tokenizer or a pre-tokenizer that is not known.
    """
    kind = file.metadata.get("tokenizer.ggml.model")
    tokens = file.metadata.get("tokenizer.ggml.tokens", ())
    types = file.metadata.get("tokenizer.ggml.token_type") or (NORMAL,) * len(tokens)
    if not tokens or len(types) != len(tokens):
        raise CheckpointError(f"{file.path} holds no usable tokenizer: {len(tokens)} tokens, {len(types)} token types.")
    if kind == "gpt2":
        tokenizer, adds_bos = _byte_level(file, tokens, types)
    elif kind == "llama":
        tokenizer, adds_bos = _sentencepiece(file, tokens, types)
    else:
        raise CheckpointError(
            f"{file.path} holds a tokenizer of kind {kind!r}; gpt2 (byte-level BPE) and llama (SentencePiece BPE) are "
            "read from GGUF. Use the model's safetensors checkpoint instead."
        )
    for token, token_type in zip(tokens, types, strict=True):
        if token_type in (CONTROL, UNKNOWN):
            tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)])
        elif token_type == USER_DEFINED:
            tokenizer.add_tokens([AddedToken(token, normalized=False, special=False)])
    if tokenizer.get_vocab_size() != sum(token_type != UNUSED for token_type in types):
        raise CheckpointError(f"{file.path}: the tokenizer lists a token twice; the file is damaged.")
    if file.metadata.get("tokenizer.ggml.add_bos_token", adds_bos):
        _prepend_bos(file, tokenizer, tokens)
    return tokenizer


def _byte_level(file: GgufFile, tokens: tuple[str, ...], types: tuple[int, ...]) -> tuple[Tokenizer, bool]:
    name = file.metadata.get("tokenizer.ggml.pre", "default")
    cut = PRE_TOKENIZERS.get(name)
    if cut is None:
        raise CheckpointError(
            f"{file.path} names the pre-tokenizer {name!r}, which is not known here; known: "
            f"{', '.join(PRE_TOKENIZERS)}. Use the model's safetensors checkpoint instead."
        )
    # Entries of type UNUSED only fill the embedding's last rows: they are not tokens.
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    # The first character belongs to the left part even when it is a space.
    merges = [
        (merge[:space], merge[space + 1 :])
        for merge in file.metadata.get("tokenizer.ggml.merges", ())
        if (space := merge.find(" ", 1)) > 0
    ]
    tokenizer = Tokenizer(models.BPE(vocab=vocabulary, merges=merges, ignore_merges=cut.ignore_merges))
    if cut.composed:
        tokenizer.normalizer = normalizers.NFC()
    bytes_only = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=cut.regex is None)
    if cut.regex is not None:
        first = pre_tokenizers.Split(Regex(cut.regex), behavior="isolated")
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([first, bytes_only])
    elif cut.single_digits:
        digits = pre_tokenizers.Digits(individual_digits=True)
        tokenizer.pre_tokenizer = pre_tokenizers.Sequence([digits, bytes_only])
    else:
        tokenizer.pre_tokenizer = bytes_only
    tokenizer.decoder = decoders.ByteLevel()
    return tokenizer, cut.adds_bos


def _sentencepiece(file: GgufFile, tokens: tuple[str, ...], types: tuple[int, ...]) -> tuple[Tokenizer, bool]:
    """Llama-2's kind: the merges are not in the file but follow from the pieces' scores, best first."""
    scores = file.metadata.get("tokenizer.ggml.scores", ())
    if len(scores) != len(tokens):
        raise CheckpointError(f"{file.path}: {len(tokens)} tokens but {len(scores)} scores; the file is damaged.")
    vocabulary = {token: index for index, token in enumerate(tokens) if types[index] != UNUSED}
    ranked = []
    for index, piece in enumerate(tokens):
        if types[index] == NORMAL:
            for cut in range(1, len(piece)):
                left, right = vocabulary.get(piece[:cut]), vocabulary.get(piece[cut:])
                if left is not None and right is not None and types[left] == types[right] == NORMAL:
                    ranked.append((-scores[index], index, left, right))
    merges = [(tokens[left], tokens[right]) for _, _, left, right in sorted(ranked)]
    unknown = next((token for token, kind in zip(tokens, types, strict=True) if kind == UNKNOWN), None)
    tokenizer = Tokenizer(
        models.BPE(vocab=vocabulary, merges=merges, unk_token=unknown, fuse_unk=True, byte_fallback=BYTE in types)
    )
    spaces = normalizers.Replace(" ", "▁")
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    if file.metadata.get("tokenizer.ggml.add_space_prefix", True):
        tokenizer.normalizer = normalizers.Sequence([normalizers.Prepend("▁"), spaces])
        steps.append(decoders.Strip(" ", 1, 0))
    else:
        tokenizer.normalizer = spaces
    tokenizer.decoder = decoders.Sequence(steps)
    return tokenizer, True


def _prepend_bos(file: GgufFile, tokenizer: Tokenizer, tokens: tuple[str, ...]) -> None:
    bos_id = file.metadata.get("tokenizer.ggml.bos_token_id")
    if bos_id is None or not 0 <= bos_id < len(tokens):
        raise CheckpointError(f"{file.path} asks for a first token but names none that exists (bos_token_id {bos_id}).")
    bos = tokens[bos_id]
    tokenizer.post_processor = processors.TemplateProcessing(
        single=f"{bos}:0 $A:0", pair=f"{bos}:0 $A:0 {bos}:1 $B:1", special_tokens=[(bos, bos_id)]
    )
