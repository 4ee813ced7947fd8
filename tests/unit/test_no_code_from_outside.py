"""Nothing that comes over the wire or lies on a disk is executed: what could is nowhere in the package."""

import ast
from pathlib import Path

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "realhf").rglob("*.py"))
# Modules whose formats execute code.
FORBIDDEN_MODULES = {"pickle", "cPickle", "cloudpickle", "dill", "joblib", "marshal", "shelve", "code", "codeop"}
FORBIDDEN_BUILTINS = {"eval", "exec", "compile", "__import__"}
FORBIDDEN_METHODS = {
    ("torch", "load"),
    ("torch", "save"),
    ("np", "load"),
    ("numpy", "load"),
    ("yaml", "load"),
    ("yaml", "unsafe_load"),
    ("yaml", "full_load"),
    ("os", "system"),
}
# torch.distributed's collectives of objects pickle them.
FORBIDDEN_SUFFIXES = ("_object", "_object_list")
IMPORTS = {"import_module", "spec_from_file_location", "exec_module"}
# The experiment and the launcher, which are the user's code, and what the code itself names: never a message or a
# checkpoint.
MAY_IMPORT_BY_NAME = {
    "realhf/__init__.py",
    "realhf/api/script/data.py",
    "realhf/api/script/functions.py",
    "realhf/base/code_files.py",
    "realhf/launch/in_process.py",
    "realhf/launch/launcher.py",
    "realhf/cli/__init__.py",
    "realhf/cpu/native.py",
    "realhf/engine/backend.py",
    "realhf/models/attention_kernels.py",
    "realhf/worker/interfaces.py",
}


def found_in(path: Path) -> list[str]:
    """What a file has of it, by line."""
    file = str(path.relative_to(ROOT))
    return [
        f"{file}:{node.lineno}: {ast.unparse(node)[:60]}"
        for node in ast.walk(ast.parse(path.read_text()))
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call | ast.Attribute) and is_forbidden(node, file)
    ]


def is_forbidden(node: ast.AST, file: str) -> bool:
    match node:
        case ast.Import(names=names):
            modules = {alias.name for alias in names}
        case ast.ImportFrom(module=module, names=names):
            modules = {str(module), *(f"{module}.{alias.name}" for alias in names)}
        case ast.Call(func=ast.Name(id=name)):
            return name in FORBIDDEN_BUILTINS
        case ast.Call(func=ast.Attribute(attr=name)) if name.endswith(FORBIDDEN_SUFFIXES):
            return True
        case ast.Call(keywords=keywords):
            return any(
                keyword.arg in ("shell", "allow_pickle")
                and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is False)
                for keyword in keywords
            )
        case ast.Attribute(value=value, attr=name):
            module = ast.unparse(value)
            return (module, name) in FORBIDDEN_METHODS or (name in IMPORTS and file not in MAY_IMPORT_BY_NAME)
        case _:
            return False
    return any(FORBIDDEN_MODULES & set(module.split(".")) for module in modules)


def test_the_package_has_nothing_that_executes_data() -> None:
    assert len(PACKAGE) > 100
    assert [line for path in PACKAGE for line in found_in(path)] == []


def test_what_is_forbidden_is_found() -> None:
    bad = (
        "import pickle",
        "from pickle import loads",
        "from multiprocessing.reduction import pickle",
        "eval(text)",
        "exec(text)",
        "torch.load(path)",
        "torch.load(path, weights_only=False)",
        "np.load(path, allow_pickle=True)",
        "yaml.load(text, Loader)",
        "dist.broadcast_object_list(values)",
        "dist.all_gather_object(values, value)",
        "subprocess.run(text, shell=True)",
        "importlib.import_module(name)",
    )
    for line in bad:
        tree = ast.parse(line)
        assert any(is_forbidden(node, "realhf/somewhere.py") for node in ast.walk(tree)), line
    good = ("import msgspec", "model.eval()", "re.compile(text)", "subprocess.run(words)")
    for line in good:
        assert not any(is_forbidden(node, "realhf/somewhere.py") for node in ast.walk(ast.parse(line))), line
