"""Load the tokenizer in a GGUF file's metadata, with the ids that llama.cpp gives.

Two kinds of BPE are read (`tokenizer.ggml.model`): "gpt2", over bytes or, for Gemma 4 and Sarvam, over characters, and
"llama", SentencePiece's, whose merges follow from scores. Definitions are from llama.cpp's src/llama-vocab.cpp and
src/unicode.cpp. Ids differ from llama.cpp's in these cases:

- qwen2: text is normalised to NFC, contractions ignore case in all of Unicode, and special are only the tokens that
  the file marks, as in the model's own tokenizer. llama.cpp knows some by their text, such as "</s>".
- Character classes follow Unicode 16, and llama.cpp's Unicode 15. Texts with newer characters may be cut elsewhere.
- Of special tokens that overlap in a text, the first one is taken; llama.cpp takes the longest.
- Special tokens of Phi-3 strip all white space of Unicode after them; llama.cpp strips ASCII white space.

Every token has its text in answers, also an unused one, of which llama.cpp shows nothing.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import tokenizers
from tokenizers import AddedToken, Regex, decoders, models, normalizers, pre_tokenizers, processors

from engine.checkpoint.gguf_file import END_TOKENS, open_gguf
from engine.errors import ModelError, NoTokenizer
from engine.text.added_tokens import require_limits
from engine.text.detokenizer import byte_alphabet
from engine.text.load_warnings import warn

logger = logging.getLogger(__name__)

_KEY = "tokenizer.ggml."
_NORMAL, _UNKNOWN, _CONTROL, _USER_DEFINED = 1, 2, 3, 4  # of tokenizer.ggml.token_type
_CUT = frozenset((_UNKNOWN, _CONTROL, _USER_DEFINED))  # found in texts before anything else
_SPACE = "▁"  # stands for a space in SentencePiece's vocabularies
_IDS_HINT = "use the model's Hugging Face folder, or token ids: prompts given as token ids still work"

_CONTRACTION = r"(?:'[sS]|'[tT]|'[rR][eE]|'[vV][eE]|'[mM]|'[lL][lL]|'[dD])"
_SPACES = r"|\s+(?!\S)|\s+"
_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+" + _SPACES
_SLASH_TAIL = r"| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+" + _SPACES
_GPT2 = r"'s|'t|'re|'ve|'m|'ll|'d| ?\p{L}+| ?\p{N}+| ?[^\s\p{L}\p{N}]+" + _SPACES
_WORD = r"[^\r\n\p{L}\p{N}]?\p{L}+"
_LLAMA3 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}{_TAIL}"
_QWEN2 = rf"{_CONTRACTION}|{_WORD}|\p{{N}}{_TAIL}"
# Upper- and lower-case words. For llama.cpp, letters beyond ASCII have both cases.
_CASED = (
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]*[\p{L}&&[^A-Z]]+CONTRACTION|"
    r"[^\r\n\p{L}\p{N}]?[\p{L}&&[^a-z]]+[\p{L}&&[^A-Z]]*CONTRACTION"
)
_GPT4O = _CASED.replace("CONTRACTION", _CONTRACTION + "?")
_MARKED_WORD = rf"[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+{_CONTRACTION}?"
_PUNCTUATED = r"[!\"#$%&'()*+,\-./:;<=>?@\[\\\]^_`{|}~][A-Za-z]+|[^\r\n\p{L}\p{P}\p{S}]?[\p{L}\p{M}]+| ?[\p{P}\p{S}]+"
_CJK = "\u4e00-\u9fa5\u3040-\u309f\u30a0-\u30ff"
_DEEPSEEK_CJK = "[\u4e00-\u9fa5\u0800-\u4e00\uac00-\ud7ff&&\\S]+"
_DEEPSEEK3 = (
    r"\p{N}{1,3}",
    f"[{_CJK}]+",
    _PUNCTUATED + r"[\r\n]*|\s*[\r\n]+" + _SPACES,
)
_DEEPSEEK_LETTERS = (
    "A-Za-z\u00b5\u00c0-\u00d6\u00d8-\u00f6\u00f8-\u01ba\u01bc-\u01bf\u01c4-\u0293\u0295-\u02af\u0370-\u0373"
    "\u0376\u0377\u037b-\u037d\u037f\u0386\u0388-\u038a\u038c\u038e-\u03a1\u03a3-\u03f5\u03f7-\u0481\u048a-\u052f"
    "\u0531-\u0556\u10a0-\u10c5\u13a0-\u13f5\u13f8-\u13fd\u1c90-\u1cba\u1cbd-\u1cbf\u1d00-\u1d2b\u1d6b-\u1d77"
    "\u1d79-\u1d9a\u1e00-\u1f15\u1f18-\u1f1d\u1f20-\u1f45\u1f48-\u1f4d\u1f50-\u1f57\u1f59\u1f5b\u1f5d"
    "\u1f5f-\u1f7d\u1f80-\u1fb4\u1fb6-\u1fbc\u1fbe\u1fc2-\u1fc4\u1fc6-\u1fcc\u1fd0-\u1fd3\u1fd6-\u1fdb"
    "\u1fe0-\u1fec\u1ff2-\u1ff4\u1ff6-\u1ffc\u2102\u2107\u210a-\u2113\u2115\u2119-\u211d\u2124\u2126\u2128"
    "\u212a-\u212d\u212f-\u2134\u2139\u213c-\u213f\u2145-\u2149\u214e\u2183\u2184\u2c00-\u2c7b\u2c7e-\u2ce4"
    "\u2ceb-\u2cee\u2cf2\u2cf3\ua640-\ua66d\ua680-\ua69b\ua722-\ua76f\ua771-\ua787\ua78b-\ua78e\uab70-\uabbf"
    "\ufb00-\ufb06\ufb13-\ufb17\uff21-\uff3a\uff41-\uff5a\U00010400-\U0001044f\U000104b0-\U000104d3"
    "\U000104d8-\U000104fb\U00010c80-\U00010cb2\U00010cc0-\U00010cf2\U000118a0-\U000118df\U0001e900-\U0001e943"
)
_NOT_PUNCTUATION = " ?[^(\\s|.,!?\u2026\u3002\uff0c\u3001\u0964\u06d4\u060c)]+"
# Groups of three digits, counted from the right. Text before a number stays with its first group, as in llama.cpp.
_THOUSANDS = r"[^\p{N}]*+(?:(?<!\p{N})\p{N}{1,2}(?=(?:\p{N}{3})*+(?!\p{N}))|\p{N}{3})|[^\p{N}]+"
_ASCII_THOUSANDS = (
    r"\p{N}+",
    r"\A(?:[^0-9]+|[0-9]{1,2}(?=(?:[0-9]{3})*+(?![0-9])))+"
    r"|[0-9]{3}(?:[^0-9]+(?:[0-9]{1,2}(?=(?:[0-9]{3})*+(?![0-9])))?)*",
)
_HAN = (
    "\u4e00-\u9fff\u3400-\u4dbf\uf900-\ufaff\U00020000-\U0002a6df\U0002a700-\U0002b73f\U0002b740-\U0002b81f"
    "\U0002b820-\U0002ceaf\U0002ceb0-\U0002ebef\U0002f800-\U0002fa1f"
)
_LINES = (r"[^\n]+|\n+",)


@dataclass(frozen=True)
class PreTokenizer:
    """How text is cut into words, within which BPE merges.

    - expressions: applied one after another, each to the parts that the ones before made. Matches become words, and
      so does what is between them.
    - ignore_merges: a word that is in the vocabulary is one token, whatever the merges say.
    - adds_bos: texts begin with BOS unless the file's `add_bos_token` says otherwise; always_bos: even then.
    - nfc: text is normalised to NFC.
    - only_marked: special are the tokens that the file marks, and none by its text.
    - is_raw: tokens are text with "▁" for spaces, and characters outside the vocabulary become byte tokens. Otherwise
      each character of a token stands for a byte.
    """

    expressions: tuple[str, ...]
    ignore_merges: bool = False
    adds_bos: bool = False
    always_bos: bool = False
    nfc: bool = False
    only_marked: bool = False
    is_raw: bool = False


_LLAMA_BPE = PreTokenizer((_LLAMA3,), ignore_merges=True, adds_bos=True)
_SINGLE_DIGITS = PreTokenizer((r"\p{N}", _GPT2))
_TABLE: Sequence[tuple[str, PreTokenizer]] = (
    (
        "default",
        PreTokenizer((r"[\p{P}\$\+<=>\^~\|]+", _GPT2, r"\p{N}+", "[0-9][0-9][0-9]")),
    ),
    (
        "gpt-2 phi-2 jina-es jina-de gigachat jina-v2-es jina-v2-de jina-v1-en jina-v2-code roberta-bpe a.x-4.0 mellum "
        "modern-bert mpt olmo jais trillion granite-docling exaone4",
        PreTokenizer((_GPT2,)),
    ),
    ("smollm starcoder refact command-r codeshell exaone minerva-7b mellum2", _SINGLE_DIGITS),
    (
        "qwen2",
        PreTokenizer((rf"(?i:'s|'t|'re|'ve|'m|'ll|'d)|{_WORD}|\p{{N}}{_TAIL}",), nfc=True, only_marked=True),
    ),
    ("deepseek-r1-qwen kormo f2llmv2 megrez stablelm2 hunyuan solar-open grok-2", PreTokenizer((_QWEN2,))),
    (
        "qwen35",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}\p{{M}}]+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{M}}\p{{N}}]+[\r\n]*|\s*[\r\n]+{_SPACES}",
            )
        ),
    ),
    ("llama3 llama-v3 llama-bpe falcon3 falcon-h1 pixtral midm-2.0 lfm2 jina-v5-nano", _LLAMA_BPE),
    ("dbrx smaug-bpe chatglm-bpe", PreTokenizer((_LLAMA3,))),
    ("glm4 glm5", PreTokenizer((_LLAMA3,), ignore_merges=True)),
    (
        "jais-2",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|{_WORD}|\p{{N}}{{1,3}}| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]+|"
                + "".join(rf"\s{{{count}}}(?!\S)|" for count in (512, 256, 128, 64, 32, 16, 8, 4))
                + r"\s{1,2}(?!\S)|\s",
            )
        ),
    ),
    ("minicpm5", PreTokenizer((r"\p{N}{1,3}", rf"{_CONTRACTION}|{_WORD}|\p{{N}}+{_TAIL}"), ignore_merges=True)),
    ("laguna", PreTokenizer((*_LINES, _QWEN2))),
    ("ufakzeka", PreTokenizer((rf"{_WORD}|\p{{N}}{_TAIL}",))),
    (
        "seed-coder",
        PreTokenizer((rf"{_CONTRACTION}|{_WORD}|\p{{N}}| ?[^\s\p{{L}}\p{{N}}\r\n]+|\s*[\r\n]+{_SPACES}",)),
    ),
    (
        "bailingmoe bailingmoe2 llada-moe",
        PreTokenizer(
            (
                rf"'(?:[sSdDmMtT]|[lL][lL]|[vV][eE]|[rR][eE])|{_WORD}|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n]*|\s*[\r\n]{_SPACES}",
            )
        ),
    ),
    (
        "exaone-moe",
        PreTokenizer(
            (
                rf"{_CONTRACTION}|[^\r\n\p{{L}}\p{{N}}]?(?:\p{{L}}\p{{M}}*(?: \p{{L}}\p{{M}}*)*)+|\p{{N}}"
                rf"| ?[^\s\p{{L}}\p{{N}}]+[\r\n/]?|\s*[\r\n]{_SPACES}",
            )
        ),
    ),
    (
        "tekken",
        PreTokenizer((_CASED.replace("CONTRACTION", "") + r"|\p{N}" + _SLASH_TAIL,), ignore_merges=True, adds_bos=True),
    ),
    ("gpt-4o llama4 kanana2 talkie minimax-m2", PreTokenizer((_GPT4O + r"|\p{N}{1,3}" + _SLASH_TAIL,))),
    (
        "granite-embed-multi-97m",
        PreTokenizer(
            (_GPT4O.replace(r"[\p{L}&&", r"[\p{L}\p{M}&&") + r"|\p{N}{1,3}" + _SLASH_TAIL,), ignore_merges=True
        ),
    ),
    ("tiny_aya cohere2moe", PreTokenizer((_THOUSANDS, _MARKED_WORD + r"|\p{N}{1,3}" + _SLASH_TAIL))),
    ("deepseek-v3 hunyuan-dense hy_v4 joyai-llm", PreTokenizer(_DEEPSEEK3)),
    ("spark2_5", PreTokenizer((*_DEEPSEEK3[:2], _PUNCTUATED + r"|[\r\n]" + _SPACES, r"\p{N}"))),
    (
        "deepseek-llm",
        PreTokenizer(
            (
                r"[\r\n]",
                rf"\s?[{_DEEPSEEK_LETTERS}]+",
                "\\s?[!-/:-~\uff01-\uff0f\uff1a-\uff5e\u2018-\u201f\u3001\u3002]+",
                r"(?<!\s)\s++\z",
                _DEEPSEEK_CJK,
                r"\p{N}+",
            )
        ),
    ),
    (
        "deepseek-coder",
        PreTokenizer((r"[\r\n]", r"\s?\p{L}+", r"\s?\p{P}+", _DEEPSEEK_CJK, r"\p{N}")),
    ),
    (
        "youtu",
        PreTokenizer(
            (
                "[\uac00-\ud7a3\u3131-\u318e]+"
                "|[\uff01\u2026\u201c\u201d\u2018\u2019\u2014\uff1a\uff1b\uff0c\u3001-\u303f\ufe30-\ufe4f]+"
                f"|[\u3105-\u312f]+|[{_CJK}]+",
                _MARKED_WORD + r"|\p{N}" + _SLASH_TAIL,
            ),
            ignore_merges=True,
        ),
    ),
    ("falcon", PreTokenizer((r"[\p{P}\$\+<=>\^~\|`]+", _GPT2, "[0-9][0-9][0-9]"))),
    ("poro-chat bloom gpt3-finnish", PreTokenizer((_NOT_PUNCTUATION,))),
    ("viking", PreTokenizer((_NOT_PUNCTUATION, r"\p{N}"))),
    (
        "chameleon",
        PreTokenizer(
            (
                "<sentinel:[0-9]+>",
                "IMGIMG[A-I]{1,4}Z",
                r"[\t\n]|    |  ",
                r"\p{N}",
                r"[\p{P}!-/:-@\[-`{-~]",
                _GPT2,
            ),
            adds_bos=True,
        ),
    ),
    ("superbpe", PreTokenizer(_ASCII_THOUSANDS)),
    (
        "kimi-k2",
        PreTokenizer((rf"[{_HAN}]+|[^\r\n\p{{L}}\p{{N}}]?[\p{{L}}&&[^{_HAN}]]+{_CONTRACTION}?|\p{{N}}{{1,3}}{_TAIL}",)),
    ),
    (
        "afmoe",
        PreTokenizer(
            (
                _THOUSANDS,
                "[\u4e00-\u9fff\u3400-\u4dbf\u8c48-\ufaff\u3040-\u309f\u30a0-\u30ff\uff65-\uff9f\u2f00-\u2fdf"
                "\u0e40-\u0e7f\u0e80-\u0eff\u1780-\u17ff\u1000-\u109f\uaa60-\uaa7f\ua9e0-\ua9ff\uac00-\ud7af\u1100-\u11ff]+",
                _DEEPSEEK3[2],
            )
        ),
    ),
    ("gemma4 granite-embed-multi-311m", PreTokenizer(_LINES, always_bos=True, is_raw=True)),
    ("sarvam-moe", PreTokenizer(_LINES, is_raw=True)),
)
PRE_TOKENIZERS: Mapping[str, PreTokenizer] = {name: one for names, one in _TABLE for name in names.split()}

# Tokens that end a generation or that fill in the middle: special by their text, even if the file says they are normal.
_ENDS = frozenset(
    "<|eot_id|> <|im_end|> <|end|> <|return|> <|call|> <|flush|> <|calls|> <end_of_turn> <|endoftext|> </s> <|eom_id|> "
    "<EOT> _<EOT> [EOT] [EOS] <|end_of_text|> <end_of_utterance> <eos> <turn|> <|tool_response> "
    "<｜end▁of▁sentence｜> [e~[".split()
)
_INFILLS: Mapping[str, str] = {
    "fim_pre prefix": "<|fim_prefix|> <fim-prefix> <fim_prefix> <｜fim▁begin｜> <PRE> ▁<PRE> <|code_prefix|> "
    "<|prefix|>",
    "fim_suf suffix": "<|fim_suffix|> <fim-suffix> <fim_suffix> <｜fim▁hole｜> <SUF> ▁<SUF> <|code_suffix|> <|suffix|>",
    "fim_mid middle": "<|fim_middle|> <fim-middle> <fim_middle> <｜fim▁end｜> <MID> ▁<MID> <|code_middle|> <|middle|>",
    "fim_pad": "<|fim_pad|> <fim-pad> <fim_pad> <PAD> [PAD]",
    "fim_rep": "<|fim_repo|> <|repo_name|> <fim-repo> <REPO> <reponame>",
    "fim_sep": "<|file_sep|>",
}
# A tag of HTML in vocabularies that don't mark it: answers show it. Where one of these is, it is a word like others.
_NORMAL_END = "</s>"
_WITH_NORMAL_END = ("<|tool_response>", "<|plamo:eos|>")


@dataclass(frozen=True)
class GGUFTokenizer:
    """A tokenizer as a GGUF file describes it.

    - eos_token_ids: ids that end a text, a turn or a message.
    - chat_template: one template, or several by name; None: no template.
    """

    backend: tokenizers.Tokenizer
    bos_token: str | None
    eos_token: str | None
    eos_token_ids: list[int]
    chat_template: str | dict[str, str] | None


def load_gguf(path: str) -> GGUFTokenizer:
    """Load the tokenizer of the GGUF file at `path`.

    Raises NoTokenizer if the file has none, or one that is not supported; ModelError if it is damaged.
    """
    metadata: dict[str, Any] = open_gguf(path).metadata
    kind = metadata.get(f"{_KEY}model")
    if kind in (None, "none", "no_vocab"):
        raise NoTokenizer(f"{path}: has no tokenizer; {_IDS_HINT}")
    if kind not in _KINDS:
        raise NoTokenizer(
            f"{path}: tokenizer {kind!r} ({_KEY}model) is not supported from GGUF files ({', '.join(_KINDS)} are); "
            f"{_IDS_HINT}"
        )
    try:
        return _KINDS[kind](path, metadata)
    except ModelError:
        raise
    except Exception as error:  # the tokenizers library raises bare Exception for bad vocabularies and merges
        raise ModelError(f"{path}: the tokenizer in its metadata is damaged: {error}") from error


def _read_bpe(path: str, metadata: dict[str, Any]) -> GGUFTokenizer:
    """Read a vocabulary with merges. Without a pre-tokenizer's name, llama.cpp's default is used, with a warning."""
    pre = metadata.get(f"{_KEY}pre") or ""
    if metadata[f"{_KEY}model"] == "gemma4":
        pre = "gemma4"
    if not pre:
        warn(
            logger,
            "%s names no pre-tokenizer (tokenizer.ggml.pre): llama.cpp's default is used, which may cut text in other "
            "places than the model's own; convert the model again",
            path,
        )
    cut = PRE_TOKENIZERS.get(pre or "default")
    if cut is None:
        raise NoTokenizer(
            f"{path}: tokenizer 'gpt2' with pre-tokenizer {pre!r} ({_KEY}pre) is not supported from GGUF files "
            f"({', '.join(sorted(PRE_TOKENIZERS))} are); {_IDS_HINT}"
        )
    vocabulary = _Vocabulary.read(metadata, only_marked=cut.only_marked)
    merges = metadata.get(f"{_KEY}merges")
    if merges is None:
        raise ValueError(f"there is no {_KEY}merges")
    pairs: list[Any] = [tuple(merge.split(" ")) for merge in dict.fromkeys(merges)]  # BPE rejects what is no pair
    if cut.is_raw:
        _require_merges_of_newlines(path, vocabulary, pairs)
        if lost := [token for token in map("<0x{:02X}>".format, range(256)) if token not in vocabulary.ids]:
            raise ValueError(f"{len(lost)} bytes, {lost[0]} first, have no token")
    backend = tokenizers.Tokenizer(
        models.BPE(vocab=vocabulary.ids, merges=pairs, ignore_merges=cut.ignore_merges, byte_fallback=cut.is_raw)
    )
    if cut.nfc:
        backend.normalizer = normalizers.NFC()
    steps: list[pre_tokenizers.PreTokenizer] = [
        pre_tokenizers.Split(Regex(expression), behavior="isolated") for expression in cut.expressions
    ]
    if cut.is_raw:
        backend.normalizer = normalizers.Replace(" ", _SPACE)
        backend.decoder = _raw_decoder(has_prefix=False)
    else:
        steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False))
        if missing := _bytes_without_token(vocabulary):  # left out, and nothing merges over them, as in llama.cpp
            escaped = "".join(f"\\x{{{ord(character):x}}}" for character in missing)
            steps.append(pre_tokenizers.Split(Regex(f"[{escaped}]"), behavior="removed"))
        backend.decoder = decoders.ByteLevel()
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    return _finish(path, metadata, backend, vocabulary, adds_bos=cut.adds_bos, always_bos=cut.always_bos)


def _bytes_without_token(vocabulary: _Vocabulary) -> str:
    """Return the characters of bytes that the vocabulary can't write. Falcon's lacks control characters."""
    return "".join(character for character in byte_alphabet() if character not in vocabulary.ids)


def _require_merges_of_newlines(path: str, vocabulary: _Vocabulary, pairs: Sequence[tuple[str, ...]]) -> None:
    """Raise NoTokenizer if a token of several newlines has no merge. llama.cpp finds it in the vocabulary."""
    runs = {token for token in vocabulary.tokens if len(token) > 1 and not token.strip("\n")}
    if missing := runs - {"".join(pair) for pair in pairs if pair[0][0] == "\n"}:
        raise NoTokenizer(
            f"{path}: {_KEY}merges lack {min(missing, key=len)!r}, which is in {_KEY}tokens: convert the model again, "
            f"{_IDS_HINT}"
        )


def _read_sentencepiece(path: str, metadata: dict[str, Any]) -> GGUFTokenizer:
    """Read a vocabulary with scores: of two neighbours, those merge first whose token has the highest score."""
    vocabulary = _Vocabulary.read(metadata)
    scores = metadata.get(f"{_KEY}scores") or [0.0]
    if len(set(scores)) == 1:
        raise NoTokenizer(
            f"{path}: tokenizer 'llama' without different scores in {_KEY}scores, which say what merges first, is not "
            f"supported; {_IDS_HINT}"
        )
    tokens = vocabulary.tokens
    defaults = {"bos": 1, "eos": 2, "unknown": 0}
    metadata = {f"{_KEY}{name}_token_id": index for name, index in defaults.items() if index < len(tokens)} | metadata
    unknown = vocabulary.token_id(metadata, f"{_KEY}unknown_token_id")
    backend = tokenizers.Tokenizer(
        models.BPE(
            vocab=vocabulary.ids,
            merges=_merges_by_score(vocabulary, scores),
            byte_fallback=True,
            unk_token=None if unknown is None else tokens[unknown],
            fuse_unk=True,
        )
    )
    has_prefix = bool(metadata.get(f"{_KEY}add_space_prefix", True))
    spaces = normalizers.Replace(" ", _SPACE)
    # Each part of a text between special tokens begins with a space.
    backend.normalizer = normalizers.Sequence([normalizers.Prepend(_SPACE), spaces]) if has_prefix else spaces
    backend.decoder = _raw_decoder(has_prefix)
    return _finish(path, metadata, backend, vocabulary, adds_bos=True)


_KINDS = {"gpt2": _read_bpe, "gemma4": _read_bpe, "llama": _read_sentencepiece}


def _merges_by_score(vocabulary: _Vocabulary, scores: Sequence[float]) -> list[tuple[str, str]]:
    """Return the pairs of tokens that make another token, the highest score first.

    Of equal scores, the pair with the longer left part comes first: a run of spaces grows from its left end, as in
    llama.cpp, which takes the leftmost pair. Special tokens are cut out of a text before it is merged.
    """
    ids, types = vocabulary.ids, vocabulary.types
    if len(scores) < len(ids):
        raise ValueError(f"there are {len(scores)} scores for {len(ids)} tokens")
    found: list[tuple[float, int, int, str, str]] = []
    for token, index in ids.items():
        if types[index] in _CUT and _SPACE not in token:
            continue
        for place in range(1, len(token)):
            left = token[:place]
            if left in ids and token[place:] in ids:
                found.append((-scores[index], -place, index, left, token[place:]))
    found.sort()
    return [(left, right) for _, _, _, left, right in found]


def _raw_decoder(has_prefix: bool) -> decoders.Decoder:
    steps = [decoders.Replace(_SPACE, " "), decoders.ByteFallback(), decoders.Fuse()]
    return decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if has_prefix else steps)


@dataclass(frozen=True)
class _Vocabulary:
    """The tokens in id order, their ids, and their types: `tokenizer.ggml.token_type` and what follows from texts."""

    tokens: list[str]
    ids: dict[str, int]
    types: list[int]

    @classmethod
    def read(cls, metadata: Mapping[str, Any], *, only_marked: bool = False) -> _Vocabulary:
        """Read the vocabulary. Empty entries get a name, as in llama.cpp. Raises ValueError."""
        tokens, given = metadata.get(f"{_KEY}tokens"), metadata.get(f"{_KEY}token_type") or []
        if not isinstance(tokens, list) or not isinstance(given, list):
            raise ValueError(f"{_KEY}tokens and {_KEY}token_type must be lists")
        tokens = [token or f"[EMPTY_{index}]" for index, token in enumerate(tokens)]
        ids = {token: index for index, token in enumerate(tokens)}
        if len(ids) != len(tokens):
            raise ValueError(f"{len(tokens) - len(ids)} of {len(tokens)} tokens appear twice")
        types = [*given[: len(tokens)], *[_NORMAL] * (len(tokens) - len(given))]
        for token in () if only_marked else _special_texts(metadata):
            if token in ids and types[ids[token]] not in _CUT:
                types[ids[token]] = _USER_DEFINED if token == _NORMAL_END else _CONTROL
        if _NORMAL_END in ids and any(token in ids for token in _WITH_NORMAL_END):
            types[ids[_NORMAL_END]] = _NORMAL
        return cls(tokens, ids, types)

    def token_id(self, metadata: Mapping[str, Any], key: str) -> int | None:
        """Return the id that a key of the metadata gives. Raises ValueError if the vocabulary doesn't have it."""
        index = metadata.get(key)
        if index is not None and (not isinstance(index, int) or not 0 <= index < len(self.tokens)):
            raise ValueError(f"{key} is {index!r} and there are {len(self.tokens)} tokens")
        return index


def _special_texts(metadata: Mapping[str, Any]) -> Iterator[str]:
    """Yield the texts that are special in any vocabulary."""
    yield from _ENDS
    for roles, texts in _INFILLS.items():
        if not any(f"{_KEY}{role}_token_id" in metadata for role in roles.split()):
            yield from texts.split()


def _finish(
    path: str,
    metadata: Mapping[str, Any],
    backend: tokenizers.Tokenizer,
    vocabulary: _Vocabulary,
    *,
    adds_bos: bool,
    always_bos: bool = False,
) -> GGUFTokenizer:
    """Add special tokens, and BOS and EOS around texts."""
    _add_special_tokens(path, metadata, backend, vocabulary)
    wanted = {
        "bos": always_bos or metadata.get(f"{_KEY}add_bos_token", adds_bos),
        "eos": metadata.get(f"{_KEY}add_eos_token", False),
    }
    tokens: dict[str, str] = {}
    around: dict[str, list[str]] = {"bos": [], "eos": []}
    used = []
    for name, is_wanted in wanted.items():
        index = vocabulary.token_id(metadata, f"{_KEY}{name}_token_id")
        if index is not None:
            tokens[name] = vocabulary.tokens[index]
        if is_wanted and index is None:
            warn(logger, "%s has no %s%s_token_id: texts get no such token", path, _KEY, name)
        elif is_wanted and index is not None:
            around[name] = [tokens[name]]
            used.append((tokens[name], index))
    if used:
        backend.post_processor = processors.TemplateProcessing(
            single=[*around["bos"], "$A", *around["eos"]], special_tokens=list(dict.fromkeys(used))
        )
    ends = [vocabulary.token_id(metadata, key) for key in END_TOKENS]
    templates = _templates(metadata)
    if metadata.get(f"{_KEY}eot_token_id") is None:
        ends += _ends_of_turns(vocabulary, templates)
    return GGUFTokenizer(
        backend,
        bos_token=tokens.get("bos"),
        eos_token=tokens.get("eos"),
        eos_token_ids=[index for index in ends if index is not None],
        chat_template=templates,
    )


def _add_special_tokens(
    path: str, metadata: Mapping[str, Any], backend: tokenizers.Tokenizer, vocabulary: _Vocabulary
) -> None:
    marked = [(token, kind) for token, kind in zip(vocabulary.tokens, vocabulary.types, strict=True) if kind in _CUT]
    require_limits([token for token, _ in marked], path)
    backend.add_special_tokens(
        [_added(token, metadata, special=True) for token, kind in marked if kind != _USER_DEFINED]
    )
    backend.add_tokens([_added(token, metadata, special=False) for token, kind in marked if kind == _USER_DEFINED])


def _added(token: str, metadata: Mapping[str, Any], *, special: bool) -> AddedToken:
    """Return a token that is found in texts. llama.cpp knows by names which tokens take the white space beside them."""
    name, pre = str(metadata.get("general.name", "")).lower(), str(metadata.get(f"{_KEY}pre", ""))
    lstrip = rstrip = False
    if any(part in pre for part in ("jina-v2-de", "jina-v2-es", "jina-v2-code")):
        lstrip = token == "<mask>"
    elif "phi-3" in name or "phi3" in name:
        rstrip = token not in ("<unk>", "<s>", "<|endoftext|>")
    elif "modern-bert" in name:
        lstrip = token == "[MASK]"
    return AddedToken(token, special=special, normalized=False, lstrip=lstrip, rstrip=rstrip)


def _ends_of_turns(vocabulary: _Vocabulary, templates: str | Mapping[str, str] | None) -> list[int]:
    """Return the ids of known ends that the chat template writes.

    llama.cpp knows ends by their text, since many files name only the end of a text: Phi-3's ends turns with <|end|>.
    """
    written = templates or "" if isinstance(templates, str | None) else "".join(templates.values())
    found = [token for token in vocabulary.tokens if token in _ENDS and token in written]
    if any(set(ends) <= vocabulary.ids.keys() for ends in (("<|return|>", "<|call|>"), ("<|calls|>", "<|flush|>"))):
        found = [token for token in found if token != "<|end|>"]  # ends a message of several (harmony, Solar Open)
    return [vocabulary.ids[token] for token in found if vocabulary.types[vocabulary.ids[token]] in _CUT]


def _templates(metadata: Mapping[str, Any]) -> str | dict[str, str] | None:
    """Return the chat template, or several by name: `tokenizer.chat_template.tool_use` is the one for tools."""
    key = "tokenizer.chat_template"
    found = {name.removeprefix(f"{key}."): text for name, text in metadata.items() if name.startswith(f"{key}.")}
    found |= {"default": metadata[key]} if key in metadata else {}
    named = {name: text for name, text in found.items() if isinstance(text, str)}
    return named.get("default") if named.keys() <= {"default"} else named
