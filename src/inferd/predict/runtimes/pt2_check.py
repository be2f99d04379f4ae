"""Whether a .pt2 archive of torch.export.save can be loaded without running code of the archive.

``torch.export.load`` unpickles, evaluates expressions and looks operators up by any name under ``torch``; its own
documentation says to trust the file. Here the archive is read first, with torch's own reader, so that both see the same
records. Everything that could run code is refused: pickled weights and objects, compiled libraries, operators that are
none of torch's tensor operators, expressions that are no arithmetic over symbols, names that would become code. The
rest is a graph of tensor operators over plain arrays. Knows the archive of torch 2.8 and newer.
"""

from __future__ import annotations

import ast
import io
import json
import re
from collections.abc import Iterator
from typing import IO, Any, Final

from inferd.errors import ModelLoadError

_LAYOUT: Final = re.compile(
    r"(?:archive_format|archive_version|byteorder|\.data/[\w.]+|models/model\.json|data/sample_inputs/model\.pt"
    r"|data/(?:weights|constants)/(?:model_(?:weights|constants)_config\.json|weight_\d+|tensor_\d+)|extra/[\w./-]+|version)"
)
_OPERATOR: Final = re.compile(
    r"torch\.ops\.(?P<space>aten|prims|quantized|quantized_decomposed|torchvision|higher_order)\.(?P<name>\w+)(?:\.\w+)?"
)
# Operators that reach beyond tensors.
_FORBIDDEN_NAMES: Final = re.compile(r"from_file|_print|_?save.*|_?load.*|__(?:init|reduce|getattr|class|call)\w*__")
_HIGHER_ORDER: Final = frozenset(
    {"cond", "while_loop", "scan", "map_impl", "associative_scan", "wrap_with_set_grad_enabled", "wrap_with_autocast"}
)
_PYTHON_OPERATORS: Final = frozenset(
    {"add", "sub", "mul", "floordiv", "truediv", "mod", "pow", "neg", "pos", "eq", "ne", "lt", "le", "gt", "ge", "and_"}
    | {"or_", "not_", "getitem", "index", "lshift", "rshift", "xor", "abs"}
)
_SCALAR_FUNCTIONS: Final = re.compile(r"math\.[a-z0-9]+|torch\.sym_[a-z]+|torch\._sym_[a-z]+")
_EXPRESSION_CALLS: Final = frozenset(
    {
        "Symbol",
        "Integer",
        "Float",
        "Rational",
        "Max",
        "Min",
        "Mod",
        "PythonMod",
        "FloorDiv",
        "CleanDiv",
        "CeilDiv",
        "Abs",
    }
    | {
        "ModularIndexing",
        "TruncToInt",
        "FloorToInt",
        "CeilToInt",
        "ToFloat",
        "IntTrueDiv",
        "FloatTrueDiv",
        "Where",
        "Eq",
    }
    | {"Ne", "Lt", "Le", "Gt", "Ge", "And", "Or", "Not", "floor", "ceiling", "Add", "Mul", "RoundToInt", "Identity"}
)
_SYMBOL: Final = re.compile(r"[A-Za-z_]\w{0,63}")
_WORDS: Final = re.compile(r"[^'\"\\\n\r(){}\[\];#`]{0,512}")
_TREE_TYPES: Final = frozenset(
    {None, "builtins.tuple", "builtins.list", "builtins.dict", "collections.OrderedDict"}
    | {"torch.fx.immutable_collections.immutable_list", "torch.fx.immutable_collections.immutable_dict"}
)
_MAX_POWERS: Final = 4
_MAX_JSON_BYTES: Final = 256 << 20


def check_archive(file: IO[bytes], name: str) -> None:
    """Raises ModelLoadError with the part of the archive that is more than a graph over arrays. ``name`` is for the
    message. The position of the file is reset to its beginning."""
    import torch

    file.seek(0)
    try:
        reader = torch._C.PyTorchFileReader(file)
        names = list(reader.get_all_records())
    except RuntimeError as error:
        raise ModelLoadError(
            f"{name} is not a complete archive of torch.export.save ({str(error).partition(chr(10))[0][:200]}); "
            "export or copy it again.",
            param="source",
        ) from None
    odd = sorted(record for record in names if not _LAYOUT.fullmatch(record))
    if odd or len(set(names)) != len(names):
        shown_names = repr(odd[0][:100]) if odd else "a record twice"
        raise _refusal(name, f"it holds {shown_names}, which is no part of an exported program of torch 2.8 or newer")
    if "models/model.json" not in names:
        raise _refusal(name, "it holds no program called model")
    for record in names:
        if record.endswith(".json") and reader.get_record_size(record) > _MAX_JSON_BYTES:
            raise _refusal(name, f"{record} is too large")
    for kind in ("weights", "constants"):
        config = f"data/{kind}/model_{kind}_config.json"
        if config not in names:
            raise _refusal(name, f"{config} is missing")
        _check_payload(name, _json(name, reader.get_record(config)))
    for sentence in _wrong(_json(name, reader.get_record("models/model.json"))):
        raise _refusal(name, sentence)
    if "data/sample_inputs/model.pt" in names:
        _check_sample(name, reader.get_record("data/sample_inputs/model.pt"))
    file.seek(0)


def _refusal(name: str, what: str) -> ModelLoadError:
    return ModelLoadError(
        f"{name} was not loaded: {what}. Export it again with torch.export.save from plain tensors, or export it to "
        "ONNX; or set allow_code: true (--allow-code) if you trust it as you trust this server's own code.",
        param="source",
    )


def _json(name: str, raw: bytes) -> Any:
    try:
        return json.loads(raw)
    except (ValueError, RecursionError):
        raise _refusal(name, "a part of it is no JSON") from None


def _check_payload(name: str, document: Any) -> None:
    entries = document.get("config") if isinstance(document, dict) else None
    if not isinstance(entries, dict):
        raise _refusal(name, "the list of its weights is malformed")
    for key, entry in entries.items():
        if not isinstance(entry, dict) or not re.fullmatch(r"(?:weight|tensor)_\d+", str(entry.get("path_name"))):
            raise _refusal(name, f"{key[:100]!r} is kept as an object of code")
        if entry.get("use_pickle"):
            raise _refusal(name, f"the weight {key[:100]!r} is kept as a pickle")
        if not _WORDS.fullmatch(key):
            raise _refusal(name, f"a weight has the name {key[:100]!r}")


def _check_sample(name: str, raw: bytes) -> None:
    """The example inputs are a pickle. torch opens it safely first, and unsafely where that fails: so it must not."""
    if not raw:
        return
    import pickle

    import torch

    try:
        torch.load(io.BytesIO(raw), weights_only=True)
    except (
        pickle.UnpicklingError,
        RuntimeError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        EOFError,
        IndexError,
    ):
        raise _refusal(name, "its example inputs are a pickle of more than tensors") from None


def _wrong(node: Any, key: str = "", depth: int = 0) -> Iterator[str]:
    """Sentences about what in the program's JSON is not allowed."""
    if depth > 200:
        yield "its program is nested too deeply"
    elif isinstance(node, dict):
        for name, value in node.items():
            if not _WORDS.fullmatch(name):
                yield f"the name {name[:100]!r} is none"
            elif name in ("metadata", "guards_code", "verifiers", "torch_version"):
                continue  # a description, which is not computed
            elif name in ("as_custom_obj", "as_opaque"):
                yield "its program uses objects of code"
            else:
                yield from _wrong(value, name, depth + 1)
    elif isinstance(node, list):
        for value in node:
            yield from _wrong(value, key, depth + 1)
    elif isinstance(node, str):
        yield from _wrong_text(node, key)


def _wrong_text(text: str, key: str) -> Iterator[str]:
    match key:
        case "target" | "as_operator":
            if not _is_operator(text):
                yield f"its program calls {text[:100]!r}, which is none of torch's tensor operators"
        case "expr_str":
            if not is_arithmetic(text):
                yield f"its shapes are computed by {text[:100]!r}, which is no arithmetic"
        case "in_spec" | "out_spec":
            if not _is_plain_tree(text):
                yield "its inputs or outputs are objects of other kinds than lists, tuples and dictionaries"
        case "as_string" | "as_strings":
            pass  # an argument's own value, which stays a text
        case "name" | "forward_arg_names" if not text.isidentifier() and text != "":
            yield f"the name {text[:100]!r} is none"
        case _:
            if not _WORDS.fullmatch(text):
                yield f"the text {text[:100]!r} is none that belongs there"


def _is_operator(text: str) -> bool:
    matched = _OPERATOR.fullmatch(text)
    if matched is not None:
        if matched["space"] == "higher_order":
            return matched["name"] in _HIGHER_ORDER
        return not _FORBIDDEN_NAMES.fullmatch(matched["name"])
    if text.startswith("_operator."):
        return text.removeprefix("_operator.") in _PYTHON_OPERATORS
    return bool(_SCALAR_FUNCTIONS.fullmatch(text))


def is_arithmetic(text: str) -> bool:
    """Whether an expression that will be evaluated consists of numbers, symbols and known functions alone."""
    if len(text) > 10_000:
        return False
    try:
        tree = ast.parse(text, mode="eval")
    except (SyntaxError, ValueError, RecursionError, MemoryError):
        return False
    nodes = list(ast.walk(tree))
    # Powers of powers are numbers that fill a machine.
    return sum(map(_is_power, nodes)) <= _MAX_POWERS and all(map(_is_term, nodes))


def _is_power(node: ast.AST) -> bool:
    match node:
        case ast.BinOp(op=ast.Pow()) | ast.Call(func=ast.Name(id="Pow")):
            return True
    return False


def _is_small(node: ast.AST) -> bool:
    """An exponent that a shape's arithmetic has."""
    match node:
        case ast.Constant(value=int() as power):
            return 0 <= power <= 8
        case ast.UnaryOp(op=ast.USub(), operand=ast.Constant(value=int() as power)):
            return 0 <= power <= 8
        case ast.Call(func=ast.Name(id="Integer"), args=[inner], keywords=[]):
            return _is_small(inner)
    return False


def _is_term(node: ast.AST) -> bool:
    match node:
        case ast.Call(func=ast.Name(id="Pow"), args=[_, exponent], keywords=[]):
            return _is_small(exponent)
        case ast.Call(func=ast.Name(id=name)):
            return name in _EXPRESSION_CALLS
        case ast.Constant(value=bool() | None):
            return True
        case ast.Constant(value=int() | float() as value):
            return abs(value) < 2**64
        case ast.Constant(value=str() as value):
            return bool(_SYMBOL.fullmatch(value))
        case ast.Name(id=name):
            return bool(_SYMBOL.fullmatch(name)) and not name.startswith("__")
        case ast.keyword(arg=name):
            return name is not None
        case ast.BinOp(op=ast.Pow(), right=exponent):
            return _is_small(exponent)
        case ast.Expression() | ast.BinOp() | ast.UnaryOp() | ast.Compare() | ast.Load():
            return True
        case ast.operator() | ast.unaryop() | ast.cmpop():
            return True
    return False


def _is_plain_tree(text: str) -> bool:
    """A serialized tree of inputs or outputs: plain containers alone."""
    if not text:
        return True
    try:
        protocol, tree = json.loads(text)
    except (ValueError, TypeError, RecursionError):
        return False
    return protocol == 1 and _is_plain_node(tree, 0)


def _is_plain_node(node: Any, depth: int) -> bool:
    if not isinstance(node, dict) or depth > 64 or node.get("type") not in _TREE_TYPES:
        return False
    context, children = node.get("context"), node.get("children_spec")
    try:
        value = json.loads(context) if isinstance(context, str) else context
    except ValueError:
        return False
    is_plain = value is None or (isinstance(value, list) and all(isinstance(one, str | int) for one in value))
    return is_plain and isinstance(children, list) and all(_is_plain_node(child, depth + 1) for child in children)
