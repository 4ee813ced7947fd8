"""Nothing that comes over the wire or lies on a disk is executed: what could is nowhere in the package."""

import ast
import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = sorted((ROOT / "realhf").rglob("*.py"))
# Modules whose formats execute code.
FORBIDDEN_MODULES = {
    "pickle",
    "_pickle",
    "cPickle",
    "cloudpickle",
    "dill",
    "joblib",
    "marshal",
    "shelve",
    "code",
    "codeop",
}
# Functions that execute what they are given, by the names that they have in their modules.
FORBIDDEN = {
    *(f"builtins.{name}" for name in ("eval", "exec", "compile", "__import__")),
    *("torch.load", "torch.save", "torch.serialization.load", "torch.serialization.save", "torch.package"),
    *("torch.jit.load", "torch.hub.load", "torch.utils.model_zoo.load_url", "torch.distributed.checkpoint.load"),
    *("numpy.load", "numpy.lib.npyio.load", "numpy.fromfile", "pandas.read_pickle"),
    *("yaml.load", "yaml.load_all", "yaml.unsafe_load", "yaml.unsafe_load_all", "yaml.full_load", "yaml.full_load_all"),
    *("yaml.Loader", "yaml.UnsafeLoader", "yaml.FullLoader", "yaml.CLoader", "yaml.CUnsafeLoader"),
    *(
        "os.system",
        "os.popen",
        "subprocess.getoutput",
        "subprocess.getstatusoutput",
        "runpy.run_path",
        "runpy.run_module",
    ),
    *("importlib.reload", "imp.load_source", "zipimport.zipimporter"),
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
    "realhf/cpu/in_order.py",
    "realhf/cpu/native.py",
    "realhf/engine/backend.py",
    "realhf/models/attention_kernels.py",
    "realhf/worker/interfaces.py",
}
# Within the sandbox of unit tests these execute programs of models and their tests, and name modules to each other
# (docs/rewards.md).
IN_THE_SANDBOX = {"realhf/rewards/program.py", "realhf/rewards/tests_of_program.py", "realhf/rewards/wire.py"}
CAN_NAME = (ast.Name, ast.Attribute, ast.Call, ast.Subscript)


def names_in(tree: ast.AST) -> dict[str, str]:
    """What each name of a file stands for, in full: `f` is torch.load after `from torch import load as f`, and after
    `t = torch; f = t.load`."""
    names = {name: f"builtins.{name}" for name in ("eval", "exec", "compile", "__import__", "getattr", "vars")}
    nodes = list(ast.walk(tree))
    for node in nodes:
        match node:
            case ast.Import(names=aliases):
                for alias in aliases:
                    names[alias.asname or alias.name.partition(".")[0]] = (
                        alias.name if alias.asname else alias.name.partition(".")[0]
                    )
            case ast.ImportFrom(module=str(module), names=aliases, level=0):
                names.update({alias.asname or alias.name: f"{module}.{alias.name}" for alias in aliases})
    given = (ast.Assign, ast.AnnAssign, ast.NamedExpr)
    nodes = [node for node in nodes if isinstance(node, given) and isinstance(node.value, CAN_NAME)]
    for _ in range(3):  # names of names
        known = FORBIDDEN | set(names.values())
        for node in nodes:
            match node:
                case (
                    ast.Assign(targets=[ast.Name(id=target)], value=value)
                    | ast.AnnAssign(target=ast.Name(id=target), value=ast.expr() as value)
                    | ast.NamedExpr(target=ast.Name(id=target), value=value)
                ) if (full := full_name(value, names)) in known:
                    names.setdefault(target, full)
    return names


def full_name(node: ast.AST | None, names: dict[str, str]) -> str:
    """What an expression stands for, such as torch.load for `t.load` and for `getattr(t, "load")`; "" for others."""
    match node:
        case ast.Name(id=name):
            return names.get(name, "")
        case ast.Attribute(value=value, attr=name):
            inner = full_name(value, names)
            return f"{inner}.{name}" if inner else ""
        case ast.Call(func=function, args=[value, ast.Constant(value=str(name)), *_]) if (
            full_name(function, names) == "builtins.getattr"
        ):
            return full_name(value, names) and f"{full_name(value, names)}.{name}"
        case ast.Subscript(value=ast.Attribute(value=value, attr="__dict__"), slice=ast.Constant(value=str(name))):
            return full_name(value, names) and f"{full_name(value, names)}.{name}"
        case ast.Subscript(value=ast.Call(func=function, args=[value]), slice=ast.Constant(value=str(name))) if (
            full_name(function, names) == "builtins.vars"
        ):
            return full_name(value, names) and f"{full_name(value, names)}.{name}"
        case ast.Subscript(value=value, slice=ast.Constant(value=str(name))) if full_name(value, names) in (
            "sys.modules",
            "__builtins__",
        ):
            return name if full_name(value, names) == "sys.modules" else f"builtins.{name}"
    return ""


def found_in(path: Path) -> list[str]:
    """What a file has of it, by line."""
    return forbidden(path.read_text(), str(path.relative_to(ROOT)))


def forbidden(text: str, file: str) -> list[str]:
    tree = ast.parse(text)
    names = names_in(tree)
    return [
        f"{file}:{node.lineno}: {ast.unparse(node)[:60]}"
        for node in ast.walk(tree)
        if isinstance(node, ast.Import | ast.ImportFrom | ast.Call | ast.Attribute | ast.Name | ast.Subscript)
        and is_forbidden(node, file, names)
    ]


def is_forbidden(node: ast.AST, file: str, names: dict[str, str]) -> bool:
    full = full_name(node, names)
    if full in FORBIDDEN or FORBIDDEN_MODULES & set(full.split(".")[:-1]):
        return True
    match node:
        case ast.Import(names=aliases):
            return any(FORBIDDEN_MODULES & set(alias.name.split(".")) for alias in aliases)
        case ast.ImportFrom(module=module, names=aliases):
            of = {f"{module}.{alias.name}" for alias in aliases}
            parts = {part for name in of for part in name.split(".")}
            return bool(FORBIDDEN_MODULES & parts or FORBIDDEN & of or "*" in parts) or (
                bool(IMPORTS & parts) and file not in MAY_IMPORT_BY_NAME
            )
        case ast.Call(func=function, args=arguments, keywords=keywords):
            method = function.attr if isinstance(function, ast.Attribute) else full_name(function, names)
            unsafe = {"shell": False, "allow_pickle": False, "weights_only": True, "trust_remote_code": False}
            reads_any_name = full_name(function, names) == "builtins.getattr" and (
                full_name(arguments[0], names) in ("yaml", "os", "builtins", "importlib", "torch.serialization")
                and not isinstance(arguments[1], ast.Constant)
            )
            return (
                method.endswith(FORBIDDEN_SUFFIXES)
                or reads_any_name
                or any(
                    keyword.arg in unsafe
                    and not (isinstance(keyword.value, ast.Constant) and keyword.value.value is unsafe[keyword.arg])
                    for keyword in keywords
                )
            )
        case ast.Attribute(attr=name):
            return name in IMPORTS and file not in MAY_IMPORT_BY_NAME
    return False


def test_the_package_has_nothing_that_executes_data() -> None:
    assert len(PACKAGE) > 100
    sandboxed = {ROOT / name for name in IN_THE_SANDBOX}
    assert sandboxed < set(PACKAGE)
    assert [line for path in PACKAGE if path not in sandboxed for line in found_in(path)] == []
    allowed = {"exec", "compile", "importlib.import_module", "getattr(builtins, name)"}
    assert {line.partition(": ")[2] for path in sandboxed for line in found_in(path)} == allowed
    # No other module imports them: they run in the sandbox's process alone.
    of_it = re.compile(r"rewards import .*program|rewards\.(program|tests_of_program)")
    importing = {path.name for path in PACKAGE if of_it.search(path.read_text())}
    assert importing == {"sandbox_process.py", "program.py"}


@pytest.mark.parametrize(
    "text",
    [
        "import pickle",
        "import pickle as p",
        "import torch.serialization, marshal",
        "from pickle import loads",
        "from multiprocessing.reduction import pickle",
        "import shelve",
        "import dill",
        "import joblib",
        "eval(text)",
        "exec(text)",
        "compile(text, '', 'exec')",
        "__import__(name)",
        "f = eval; f(text)",
        "import builtins; builtins.eval(text)",
        "from builtins import exec as run; run(text)",
        "getattr(builtins, 'eval')(text)\nimport builtins",
        "import torch; torch.load(path)",
        "import torch; torch.load(path, weights_only=True)",
        "import torch as t; t.load(path)",
        "from torch import load as f",
        "from torch import load",
        "from torch import serialization; serialization.load(path)",
        "import torch; f = torch.load; f(path)",
        "import torch; t = torch; u = t; u.load(path)",
        "import torch; getattr(torch, 'load')(path)",
        "import builtins; getattr(builtins, name)(path)",
        "import torch; torch.__dict__['load'](path)",
        "import torch; vars(torch)['load'](path)",
        "import sys; sys.modules['torch'].load(path)",
        "import sys; sys.modules['pickle'].loads(data)",
        "import torch; values = map(torch.load, paths)",
        "import numpy as np; np.load(path)",
        "import numpy as np; np.load(path, allow_pickle=True)",
        "from numpy import load",
        "read(path, allow_pickle=yes)",
        "import yaml; yaml.load(text, Loader)",
        "from yaml import unsafe_load as u; u(text)",
        "from yaml import *",
        "dist.broadcast_object_list(values)",
        "dist.all_gather_object(values, value)",
        "from torch.distributed import all_gather_object as g; g(values, value)",
        "subprocess.run(text, shell=True)",
        "import os; os.system(text)",
        "from os import popen; popen(text)",
        "importlib.import_module(name)",
        "from importlib import import_module as i; i(name)",
        "import runpy; runpy.run_path(path)",
        "Model.from_pretrained(path, trust_remote_code=True)",
        "Model.from_pretrained(path, weights_only=False)",
    ],
)
def test_what_is_forbidden_is_found(text: str) -> None:
    assert forbidden(text, "realhf/somewhere.py")


def test_what_is_allowed_is_not_found() -> None:
    for text in (
        "import msgspec",
        "model.eval()",
        "import re; re.compile(text)",
        "import subprocess; subprocess.run(words)",
        "import torch; torch.compile(model)",
        "import json; json.load(file)",
        "getattr(options, name)",
        "import torch; getattr(torch, 'float32')",
        "Model.from_pretrained(path, trust_remote_code=False)",
        "from realhf.base.code_files import python_command",
    ):
        assert not forbidden(text, "realhf/somewhere.py"), text
