"""A transformers tokenizer from a GGUF header.

Byte-level BPE vocabularies are built here (transformers needs seconds to parse the header again); others are left
to transformers.
"""

from typing import Any

from aspire.model.gguf import GgufFile

_CONTROL = 3  # token type of special tokens; 4: user-defined
_USER_DEFINED = 4
_LLAMA3 = (r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+"
           r"|\s+(?!\S)|\s+")
_QWEN2 = _LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_PATTERNS = {"llama-bpe": _LLAMA3, "llama3": _LLAMA3, "qwen2": _QWEN2, "deepseek-r1-qwen": _QWEN2}


def gguf_tokenizer(file: GgufFile) -> Any:
    """The tokenizer, chat template included. Raises ValueError if the file has no vocabulary."""
    if "tokenizer.ggml.tokens" not in file.fields:
        raise ValueError(f"{file.path}: the GGUF header holds no tokenizer")
    pre = file.fields.get("tokenizer.ggml.pre", "default")
    if file.fields.get("tokenizer.ggml.model") != "gpt2" or pre not in ("smollm", "default", "gpt-2", *_PATTERNS):
        from transformers import AutoTokenizer

        return AutoTokenizer.from_pretrained(file.path.parent, gguf_file=file.path.name, local_files_only=True)
    return _byte_level(file, pre)


def _byte_level(file: GgufFile, pre: str) -> Any:
    from tokenizers import AddedToken, Tokenizer, decoders, models, processors
    from transformers import PreTrainedTokenizerFast

    tokens: list[str] = file.fields["tokenizer.ggml.tokens"]
    kinds = file.fields.get("tokenizer.ggml.token_type") or [1] * len(tokens)
    merges = [tuple(merge.split(" ", 1)) for merge in file.fields.get("tokenizer.ggml.merges", ())]
    tokenizer = Tokenizer(models.BPE({token: index for index, token in enumerate(tokens)}, merges,
                                     fuse_unk=False, byte_fallback=False))
    tokenizer.pre_tokenizer = _pre_tokenizer(pre)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens([AddedToken(token, normalized=False, special=True)
                                  for token, kind in zip(tokens, kinds, strict=True) if kind == _CONTROL])
    tokenizer.add_tokens([AddedToken(token, normalized=False) for token, kind in zip(tokens, kinds, strict=True)
                          if kind == _USER_DEFINED])
    special = {name: token for name, key in (
        ("bos_token", "bos"), ("eos_token", "eos"), ("unk_token", "unknown"), ("pad_token", "padding"))
        if (token := _token(file, tokens, key)) is not None}
    if file.fields.get("tokenizer.ggml.add_bos_token") and "bos_token" in special:
        bos = special["bos_token"]
        tokenizer.post_processor = processors.TemplateProcessing(
            single=f"{bos} $A", pair=f"{bos} $A {bos} $B", special_tokens=[(bos, tokens.index(bos))])
    result = PreTrainedTokenizerFast(tokenizer_object=tokenizer, clean_up_tokenization_spaces=False, **special)
    result.chat_template = file.fields.get("tokenizer.chat_template")
    return result


def _pre_tokenizer(pre: str) -> Any:
    from tokenizers import Regex, pre_tokenizers

    if pre in _PATTERNS:
        return pre_tokenizers.Sequence([pre_tokenizers.Split(Regex(_PATTERNS[pre]), "isolated"),
                                        pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)])
    level = pre_tokenizers.ByteLevel(add_prefix_space=False)
    if pre == "smollm":
        return pre_tokenizers.Sequence([pre_tokenizers.Digits(individual_digits=True), level])
    return level


def _token(file: GgufFile, tokens: list[str], key: str) -> str | None:
    index = file.fields.get(f"tokenizer.ggml.{key}_token_id")
    return None if index is None or not 0 <= index < len(tokens) else tokens[index]
