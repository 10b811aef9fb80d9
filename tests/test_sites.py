"""Paths, ports and sites: what each form of pattern names, in which order, and what the errors say."""

from __future__ import annotations

import contextlib
import dataclasses
import fnmatch
import pickle
import re
import time
import typing

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from hookline import sites
from hookline.errors import ArgumentError, OptionError, SiteError
from hookline.sites import (
    PORTS,
    Site,
    canonical_paths,
    check_ports,
    label,
    match_paths,
    nearest,
    resolve,
    resolve_paths,
)


class Block(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, 1)
        self.bn1 = nn.BatchNorm2d(1)
        self.conv2 = nn.Conv2d(1, 1, 1)


class ResNet(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1 = nn.Conv2d(1, 1, 1)
        self.layer1 = nn.Sequential(Block())
        self.layer2 = nn.Sequential(Block(), Block())
        self.fc = nn.Linear(1, 1)


class Tied(nn.Module):
    """One embedding and one block of two under two names each."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(2, 2)
        self.encoder = nn.ModuleDict({"embed": self.embed, "norm": nn.LayerNorm(2)})
        self.decoder = self.encoder
        self.head = nn.Linear(2, 2)


BLOCK = ("conv1", "bn1", "conv2")
RESNET_PATHS = [
    "",
    "conv1",
    "layer1",
    "layer1.0",
    *(f"layer1.0.{name}" for name in BLOCK),
    "layer2",
    "layer2.0",
    *(f"layer2.0.{name}" for name in BLOCK),
    "layer2.1",
    *(f"layer2.1.{name}" for name in BLOCK),
    "fc",
]
ROOT_HINT = "List the names with [n for n, _ in model.named_modules()]."


WANTED_PORT = 'wanted one of "input", "output", "grad_input", "grad_output"'


@pytest.fixture(scope="module")
def resnet() -> ResNet:
    return ResNet()


def named(*names: str) -> nn.Module:
    """A model with one child for each name, whatever characters it has."""
    model = nn.Module()
    for name in names:
        model.add_module(name, nn.Identity())
    return model


# ---------------------------------------------------------------- one site


def test_label_shows_the_root():
    assert label("") == "(root)" == sites.ROOT_LABEL
    assert label("layer1.0") == "layer1.0"


@pytest.mark.parametrize(
    ("site", "text"),
    [
        (Site("layer1.0.conv1", "output"), "layer1.0.conv1:output"),
        (Site("", "output"), "(root):output"),
        (Site("a:b", "grad_input"), "a:b:grad_input"),
        (Site("a:output", "input"), "a:output:input"),
    ],
)
def test_a_site_is_written_as_path_and_port_and_read_back(site, text):
    assert str(site) == text
    assert Site.parse(text) == site


def test_a_port_alone_after_a_colon_is_a_site_of_the_root():
    assert Site.parse(":output") == Site("", "output")


@given(st.text(max_size=12).filter(lambda path: path != "(root)"), st.sampled_from(PORTS))
def test_every_site_but_that_of_a_module_called_root_reads_back(path, port):
    assert Site.parse(str(Site(path, port))) == Site(path, port)


def test_a_site_can_be_a_key_is_ordered_frozen_and_pickled():
    assert {Site("a", "output"): 1}[Site("a", "output")] == 1
    assert sorted([Site("b", "input"), Site("a", "output"), Site("a", "input")])[0] == Site("a", "input")
    assert pickle.loads(pickle.dumps(Site("a", "output"))) == Site("a", "output")
    with pytest.raises(dataclasses.FrozenInstanceError):
        Site("a", "output").path = "b"


def test_a_site_needs_a_known_port():
    with pytest.raises(OptionError, match=r'unknown port: got "outptu", .*; nearest: "output"'):
        Site("a", "outptu")


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("layer1", '"layer1": no port; a site is written path:port, as in "layer1:output"'),
        ("output", '"output": no port; a site is written path:port, as in "layer1:output"'),
        (
            "layer1:outptu",
            f'"layer1:outptu": unknown port: got "outptu", {WANTED_PORT}; nearest: "output"; '
            'a site is written path:port, as in "layer1:output"',
        ),
    ],
)
def test_parse_says_what_is_wrong_with_a_text(text, message):
    with pytest.raises(SiteError) as raised:
        Site.parse(text)
    assert str(raised.value) == message


def test_parse_takes_strings_only():
    with pytest.raises(ArgumentError, match=r'a site is a string such as "layer1:output"; got an object of type int'):
        Site.parse(3)


# ---------------------------------------------------------------- ports


@pytest.mark.parametrize(
    ("ports", "expected"),
    [
        ("output", ("output",)),
        (["grad_output", "input"], ("input", "grad_output")),
        (("output", "output"), ("output",)),
        ({"grad_input"}, ("grad_input",)),
        ((p for p in reversed(PORTS)), PORTS),
    ],
)
def test_check_ports_gives_each_port_once_in_the_order_of_a_call(ports, expected):
    assert check_ports(ports) == expected


def test_a_wrong_port_is_told_with_the_four_and_the_nearest():
    with pytest.raises(OptionError) as raised:
        check_ports(["output", "gradoutput"])
    assert str(raised.value) == (
        'unknown port: got "gradoutput", wanted one of "input", "output", "grad_input", "grad_output"; '
        'nearest: "grad_output"'
    )


@pytest.mark.parametrize(
    ("ports", "kind", "message"),
    [
        ([], OptionError, 'ports: got none, wanted one or more of "input", "output", "grad_input", "grad_output"'),
        ("", OptionError, 'unknown port: got "", wanted one of "input", "output", "grad_input", "grad_output"'),
        (
            "weights",
            OptionError,
            'unknown port: got "weights", wanted one of "input", "output", "grad_input", "grad_output"',
        ),
        ([1], OptionError, "unknown port: got an object of type int, wanted one of"),
        ([["output"]], OptionError, "unknown port: got an object of type list, wanted one of"),
        (None, ArgumentError, "ports: got an object of type NoneType, wanted one or more of"),
    ],
)
def test_check_ports_refuses(ports, kind, message):
    with pytest.raises(kind) as raised:
        check_ports(ports)
    assert str(raised.value).startswith(message)


def test_resolve_checks_the_ports_too(resnet):
    with pytest.raises(OptionError, match='unknown port: got "outputs"'):
        resolve(resnet, "fc", ports="outputs")


# ---------------------------------------------------------------- what a pattern names


def test_the_model_of_these_tests_has_the_paths_written_above(resnet):
    assert [name for name, _ in resnet.named_modules()] == RESNET_PATHS


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("layer1.0.conv1", ["layer1.0.conv1"]),
        ("", [""]),
        ("(root)", [""]),
        ("*", ["conv1", "layer1", "layer2", "fc"]),
        ("layer*", ["layer1", "layer2"]),
        ("layer?", ["layer1", "layer2"]),
        ("layer[2-9]", ["layer2"]),
        ("layer[!2]", ["layer1"]),
        ("layer[13]", ["layer1"]),
        ("*.*", ["layer1.0", "layer2.0", "layer2.1"]),
        ("layer2.*.conv?", ["layer2.0.conv1", "layer2.0.conv2", "layer2.1.conv1", "layer2.1.conv2"]),
        ("**", RESNET_PATHS),
        ("**.**", RESNET_PATHS),
        ("*.**", RESNET_PATHS[1:]),
        ("**.*", RESNET_PATHS[1:]),
        ("**.conv1", ["conv1", "layer1.0.conv1", "layer2.0.conv1", "layer2.1.conv1"]),
        ("layer1.**", ["layer1", "layer1.0", "layer1.0.conv1", "layer1.0.bn1", "layer1.0.conv2"]),
        ("**.layer2.**.conv2", ["layer2.0.conv2", "layer2.1.conv2"]),
        ("layer1**", ["layer1"]),
        ("re:.*conv2", ["layer1.0.conv2", "layer2.0.conv2", "layer2.1.conv2"]),
        (r"re:layer\d", ["layer1", "layer2"]),
        ("re:", [""]),
        ("re:.*", RESNET_PATHS),
        (nn.Linear, ["fc"]),
        (nn.Sequential, ["layer1", "layer2"]),
        (nn.Module, RESNET_PATHS),
        (ResNet, [""]),
        (lambda path, module: path.count(".") == 1, ["layer1.0", "layer2.0", "layer2.1"]),
        (lambda path, module: getattr(module, "in_features", 0), ["fc"]),
        (["fc", "conv1"], ["conv1", "fc"]),
        (("fc", nn.Linear, "fc", ["*1"]), ["conv1", "layer1", "fc"]),
        (["**.conv1", "!layer2.**"], ["conv1", "layer1.0.conv1"]),
        (["!layer2.**", "**.conv1"], ["conv1", "layer1.0.conv1"]),
        (["!re:.+"], [""]),
        (["!layer*.**", "!(root)"], ["conv1", "fc"]),
        (
            "!**.0.**",
            ["", "conv1", "layer1", "layer2", "layer2.1", "layer2.1.conv1", "layer2.1.bn1", "layer2.1.conv2", "fc"],
        ),
        ([nn.Conv2d, ["!conv1", ["!layer2.**"]]], ["layer1.0.conv1", "layer1.0.conv2"]),
        (["fc", "!conv1"], ["fc"]),
    ],
)
def test_a_pattern_names(resnet, pattern, expected):
    assert resolve(resnet, pattern) == [Site(path, "output") for path in expected]
    assert resolve_paths(resnet, pattern) == expected


@pytest.mark.parametrize(
    ("pattern", "ports", "expected"),
    [
        ("fc", "grad_output", ["fc:grad_output"]),
        ("fc:grad_output", "input", ["fc:grad_output"]),
        (":input", "output", ["(root):input"]),
        ("(root):input", "output", ["(root):input"]),
        ("layer*:input", "output", ["layer1:input", "layer2:input"]),
        (r"re:layer\d:grad_input", "output", ["layer1:grad_input", "layer2:grad_input"]),
        ("re:(?:fc|conv1):input", "output", ["conv1:input", "fc:input"]),
        (["fc:grad_output", "fc", "fc:input"], "output", ["fc:input", "fc:output", "fc:grad_output"]),
        (["fc", "conv1"], ("grad_output", "input"), ["conv1:input", "conv1:grad_output", "fc:input", "fc:grad_output"]),
        (["layer*", "!layer1:output"], ("input", "output"), ["layer1:input", "layer2:input", "layer2:output"]),
        (["layer*", "!layer1"], ("input", "output"), ["layer2:input", "layer2:output"]),
        (["layer*:output", "!re:layer[1]:output"], "input", ["layer2:output"]),
        (
            ["!layer*.**", "!conv1:output", "!:input"],
            ("input", "output"),
            ["(root):output", "conv1:input", "fc:input", "fc:output"],
        ),
    ],
)
def test_ports_in_patterns(resnet, pattern, ports, expected):
    assert [str(site) for site in resolve(resnet, pattern, ports)] == expected


def test_paths_stay_while_one_port_does(resnet):
    assert resolve_paths(resnet, ["fc", "conv1", "!fc:output"]) == ["conv1", "fc"]
    assert resolve_paths(resnet, "layer*:grad_output") == ["layer1", "layer2"]
    with pytest.raises(SiteError, match="nothing is left"):
        resolve_paths(resnet, ["fc:output", "!fc:output"])


def test_what_a_function_raises_passes_unchanged(resnet):
    error = KeyError("mine")

    def broken(path, module):
        raise error

    with pytest.raises(KeyError) as raised:
        resolve(resnet, broken)
    assert raised.value is error


def test_a_module_without_children_has_the_root_only():
    assert resolve(nn.Linear(1, 1), "**") == [Site("", "output")]
    with pytest.raises(SiteError, match=r'"\*" matches none of the 1 module of Linear'):
        resolve(nn.Linear(1, 1), "*")


# ---------------------------------------------------------------- shared modules


def test_canonical_paths_maps_every_alias_to_the_first_path():
    assert list(canonical_paths(Tied()).items()) == [
        ("", ""),
        ("embed", "embed"),
        ("encoder", "encoder"),
        ("encoder.embed", "embed"),
        ("encoder.norm", "encoder.norm"),
        ("decoder", "encoder"),
        ("decoder.embed", "embed"),
        ("decoder.norm", "encoder.norm"),
        ("head", "head"),
    ]


def test_first_paths_are_those_of_torch():
    model = Tied()
    assert list(dict.fromkeys(canonical_paths(model).values())) == [name for name, _ in model.named_modules()]


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("decoder.norm", ["encoder.norm"]),
        ("decoder.*", ["embed", "encoder.norm"]),
        ("re:decoder.*", ["embed", "encoder", "encoder.norm"]),
        (nn.Embedding, ["embed"]),
        (lambda path, module: path == "decoder.embed", ["embed"]),
        (["**.norm", "head", "!decoder.norm"], ["head"]),
        ("**", ["", "embed", "encoder", "encoder.norm", "head"]),
    ],
)
def test_an_alias_is_matched_and_named_by_the_first_path(pattern, expected):
    assert resolve_paths(Tied(), pattern) == expected


def test_a_module_below_itself_does_not_end_in_a_recursion():
    model = nn.Module()
    model.first, model.child = nn.Identity(), nn.Module()
    model.child.parent, model.child.leaf = model, model.first
    assert resolve_paths(model, "**") == ["", "first", "child"] == [name for name, _ in model.named_modules()]
    assert list(canonical_paths(model)) == ["", "first", "child"]


# ---------------------------------------------------------------- odd names


ODD = ("a b", "a:b", "ü/ö", "x*", "x[1]", "!x", "re:y", "re", "y:output", "q?:outptu", "(in)", "%", "new\nline", "**")


@pytest.mark.parametrize("name", ODD)
@pytest.mark.parametrize("port", PORTS)
def test_a_module_with_an_odd_name_is_found_by_it_and_by_its_site(name, port):
    model = named("x", "x1", "y", "outputs", *ODD)
    assert resolve(model, name, port) == [Site(name, port)]
    assert resolve(model, str(Site(name, port))) == [Site(name, port)]


def test_an_odd_name_can_be_excluded_too():
    model = named(*ODD)
    for name in ODD:
        assert resolve_paths(model, f"!{name}") == ["", *(other for other in ODD if other != name)]


def test_globs_and_expressions_see_odd_characters_too():
    model = named("a b", "a:b", "ü/ö", "new\nline")
    assert resolve_paths(model, "a?b") == ["a b", "a:b"]
    assert resolve_paths(model, "*:b") == ["a:b"]
    assert resolve_paths(model, "[ü]/*") == ["ü/ö"]
    assert resolve_paths(model, "new*line") == ["new\nline"]


def test_what_reads_as_a_port_is_one_unless_a_module_has_that_name():
    assert resolve(named("y"), "y:output", "input") == [Site("y", "output")]
    assert resolve(named("y", "y:output"), "y:output", "input") == [Site("y:output", "input")]
    assert resolve(named("y:output"), "y*:output", "input") == [Site("y:output", "output")]
    assert resolve(named("output"), "re:output", "input") == [Site("output", "input")]
    assert resolve(named("output", "re"), "re:output", "input") == [Site("re", "output")]
    assert resolve(named("!x"), "!x:output", "input") == [Site("!x", "output")]


def test_a_module_called_like_the_root_label_wins_over_it():
    assert resolve_paths(named("(root)"), "(root)") == ["(root)"]
    assert resolve_paths(named("(root)"), "") == [""]


# ---------------------------------------------------------------- errors


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "layr1.0.conv1",
            'no module "layr1.0.conv1" in ResNet; '
            f'nearest: "layer1.0.conv1", "layer1.0.conv2", "layer2.0.conv1". {ROOT_HINT}',
        ),
        ("layr2", f'no module "layr2" in ResNet; nearest: "layer2", "layer1", "layer2.0". {ROOT_HINT}'),
        ("bn1", f'no module "bn1" in ResNet; nearest: "layer1.0.bn1", "layer2.0.bn1", "layer2.1.bn1". {ROOT_HINT}'),
        ("root", f'no module "root" in ResNet; nearest: "(root)". {ROOT_HINT}'),
        ("FC", f'no module "FC" in ResNet; nearest: "fc". {ROOT_HINT}'),
        ("fc.weight", f'no module "fc.weight" in ResNet. {ROOT_HINT}'),
        ("zzzz", f'no module "zzzz" in ResNet. {ROOT_HINT}'),
        ("layr1:output", f'no module "layr1" in ResNet; nearest: "layer1", "layer2", "layer1.0". {ROOT_HINT}'),
        ("!layr1", f'no module "layr1" in ResNet; nearest: "layer1", "layer2", "layer1.0". {ROOT_HINT}'),
        (
            "layr*.0.conv1",
            'the pattern "layr*.0.conv1" matches none of the 17 modules of ResNet; '
            f'nearest: "layer1.0.conv1", "layer2.0.conv1", "layer1.0.conv2". {ROOT_HINT}',
        ),
        (
            "**.cnov1",
            'the pattern "**.cnov1" matches none of the 17 modules of ResNet; '
            f'nearest: "conv1", "layer1.0.conv1", "layer2.0.conv1". {ROOT_HINT}',
        ),
        ("*.*.*.*", f'the pattern "*.*.*.*" matches none of the 17 modules of ResNet. {ROOT_HINT}'),
        ("zz[z", f'the pattern "zz[z" matches none of the 17 modules of ResNet. {ROOT_HINT}'),
        (
            "*bn1",
            'the pattern "*bn1" matches none of the 17 modules of ResNet; * stays inside one level, but "layer1.0.bn1" '
            f"has more: ** alone between dots is any number of levels. {ROOT_HINT}",
        ),
        ("re:conv9", f'the pattern "re:conv9" matches none of the 17 modules of ResNet. {ROOT_HINT}'),
        (
            "re:bn",
            'the pattern "re:bn" matches none of the 17 modules of ResNet; it must match the whole path: put .* before '
            f"or after it to match a part. {ROOT_HINT}",
        ),
        (nn.Conv3d, f'no Conv3d among the 17 modules of ResNet; nearest: "Conv2d". {ROOT_HINT}'),
        (nn.ReLU, f"no ReLU among the 17 modules of ResNet. {ROOT_HINT}"),
    ],
)
def test_a_pattern_that_names_nothing(resnet, pattern, message):
    for way in (pattern, ["fc", pattern], ["**", [pattern]]):
        with pytest.raises(SiteError) as raised:
            resolve(resnet, way)
        assert str(raised.value) == message
        with pytest.raises(LookupError):
            resolve_paths(resnet, way)


def test_a_function_that_accepts_nothing_is_named(resnet):
    def is_wide(path, module):
        return False

    with pytest.raises(SiteError) as raised:
        resolve(resnet, is_wide)
    assert str(raised.value) == f"the function is_wide accepts none of the 17 modules of ResNet. {ROOT_HINT}"


def test_a_function_object_without_a_name_is_shown(resnet):
    class Never:
        def __call__(self, path, module):
            return False

        def __repr__(self):
            return "Never()"

    with pytest.raises(SiteError, match=re.escape("the function Never() accepts none")):
        resolve(resnet, Never())


def test_modules_are_counted_once():
    with pytest.raises(SiteError, match="none of the 5 modules of Tied"):
        resolve(Tied(), "z*")


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        (
            "layer1:grad_outptu",
            f'"layer1:grad_outptu": unknown port: got "grad_outptu", {WANTED_PORT}; nearest: "grad_output"',
        ),
        ("layr1:outptu", f'"layr1:outptu": unknown port: got "outptu", {WANTED_PORT}; nearest: "output"'),
        ("layer*:outputs", f'"layer*:outputs": unknown port: got "outputs", {WANTED_PORT}; nearest: "output"'),
        (
            "re:layer.:outputs",
            f'"re:layer.:outputs": unknown port: got "outputs", {WANTED_PORT}; nearest: "output"',
        ),
        ("layer1:weight", f'"layer1:weight": unknown port: got "weight", {WANTED_PORT}'),
        (":weight", f'":weight": unknown port: got "weight", {WANTED_PORT}'),
    ],
)
def test_a_right_side_that_looks_like_a_port(resnet, pattern, message):
    with pytest.raises(SiteError) as raised:
        resolve(resnet, ["fc", pattern])
    assert str(raised.value) == message


@pytest.mark.parametrize("pattern", ["zz:weight", "layer1:a b", "re:outputs", "re:(?:zz|outputs)"])
def test_a_right_side_that_does_not(resnet, pattern):
    with pytest.raises(SiteError, match=r"^(no module|the pattern)"):
        resolve(resnet, pattern)


@pytest.mark.parametrize(
    ("pattern", "message"),
    [
        ("re:conv(", 'the pattern "re:conv(" cannot be read: missing ), unterminated subpattern at position 4'),
        ("re:*", 'the pattern "re:*" cannot be read: nothing to repeat at position 0'),
        ("!re:[", 'the pattern "re:[" cannot be read: unterminated character set at position 0'),
        ("layer[9-1]", 'the pattern "layer[9-1]" cannot be read: bad character range 9-1 at position '),
        ("re:a{99999999999}", 'the pattern "re:a{99999999999}" cannot be read: the repetition number is too large'),
    ],
)
def test_a_pattern_that_cannot_be_read(resnet, pattern, message):
    with pytest.raises(SiteError) as raised:
        resolve(resnet, pattern)
    assert str(raised.value).startswith(message)


@pytest.mark.parametrize(
    ("pattern", "got"),
    [
        (3, "an object of type int"),
        (None, "an object of type NoneType"),
        (b"fc", "an object of type bytes"),
        ({"fc"}, "an object of type set"),
        (int, "the class int"),
        (nn.Linear(1, 1), "an object of type Linear; name it by its path or its class"),
    ],
)
def test_a_pattern_of_a_wrong_kind_is_told_before_anything_is_called(resnet, pattern, got):
    called = []
    for way in (pattern, [lambda path, module: called.append(path), [pattern]]):
        with pytest.raises(ArgumentError) as raised:
            resolve(resnet, way)
        assert str(raised.value) == (
            "a pattern is a string, a module class, a function (path, module) -> bool, or a list or tuple of these; "
            f"got {got}"
        )
    assert called == []


@pytest.mark.parametrize(
    "function", [lambda model: resolve(model, "**"), lambda model: resolve_paths(model, "**"), canonical_paths]
)
@pytest.mark.parametrize(
    ("model", "got"),
    [
        ({"a": 1}, "an object of type dict"),
        ("fc", "an object of type str"),
        (ResNet, "the class ResNet; make an instance of it"),
    ],
)
def test_a_model_of_a_wrong_kind(function, model, got):
    with pytest.raises(ArgumentError) as raised:
        function(model)
    assert str(raised.value) == f"the model must be a torch.nn.Module; got {got}"


@pytest.mark.parametrize("pattern", [[], (), ["fc", []]])
def test_an_empty_list_names_nothing(resnet, pattern):
    with pytest.raises(SiteError, match=re.escape('an empty list names no module; "**" names every module')):
        resolve(resnet, pattern)


def test_everything_excluded(resnet):
    with pytest.raises(SiteError) as raised:
        resolve(resnet, ["layer1", "layer2", "!fc", "!layer*"], ("input", "output"))
    assert str(raised.value) == (
        'nothing is left of 4 sites without "!fc", "!layer*"; leave out an exclude or choose more'
    )
    with pytest.raises(SiteError, match="nothing is left of 17 sites"):
        resolve(resnet, "!**")


# ---------------------------------------------------------------- paths without a model


@pytest.mark.parametrize(
    ("pattern", "expected"),
    [
        ("", [""]),
        ("(root)", [""]),
        ("b.c", ["b.c"]),
        ("b.*", ["b.c", "b.a"]),
        ("re:.*a", ["b.a", "a"]),
        (["a", "b.c:output"], ["b.c", "a"]),
        (["!b.**"], ["", "a"]),
    ],
)
def test_match_paths_keeps_the_order_given(pattern, expected):
    assert match_paths(pattern, ["b.c", "", "b.a", "a", "b.c"]) == expected


@pytest.mark.parametrize("pattern", ["**", "layer?.**", "**.conv1", ["**", "!layer*"], "re:.*0.*", "fc:output"])
def test_match_paths_equals_resolve_paths(resnet, pattern):
    assert match_paths(pattern, RESNET_PATHS) == resolve_paths(resnet, pattern)


@pytest.mark.parametrize(
    ("pattern", "paths", "message"),
    [
        (
            "layr1",
            ["layer1", "fc"],
            'no module "layr1" in the 2 paths; nearest: "layer1". The paths are "layer1", "fc".',
        ),
        (
            "z*",
            ["", "a", "b", "c"],
            'the pattern "z*" matches none of the 4 paths. The paths are "(root)", "a", "b" and others.',
        ),
        ("", ["a"], 'no module "(root)" in the 1 path. The paths are "a".'),
        ("**", [], 'the pattern "**" matches none of the 0 paths. The paths are none.'),
        ("a:outptu", ["a"], f'"a:outptu": unknown port: got "outptu", {WANTED_PORT}; nearest: "output"'),
    ],
)
def test_match_paths_says_what_is_there(pattern, paths, message):
    with pytest.raises(SiteError) as raised:
        match_paths(pattern, paths)
    assert str(raised.value) == message


@pytest.mark.parametrize(
    ("pattern", "got"),
    [
        (nn.Linear, "the class Linear"),
        (lambda path, module: True, "an object of type function"),
        (3, "an object of type int"),
    ],
)
def test_match_paths_takes_strings_only(pattern, got):
    with pytest.raises(ArgumentError) as raised:
        match_paths(["a", pattern], ["a"])
    assert str(raised.value) == f"without a model a pattern is a string or a list of strings; got {got}"


# ---------------------------------------------------------------- globs against an independent matcher


def naive_match(levels: list[str], path: list[str]) -> bool:
    """By recursion over whole levels; fnmatch knows the rest, since a level has no dot."""
    if not levels:
        return not path
    if levels[0] == "**":
        return naive_match(levels[1:], path) or (bool(path) and naive_match(levels, path[1:]))
    return bool(path) and fnmatch.fnmatchcase(path[0], levels[0]) and naive_match(levels[1:], path[1:])


NAMES = st.text("ab1", min_size=1, max_size=2) | st.text("ab1-!]", min_size=1, max_size=3)
PATHS = st.lists(NAMES, max_size=4).map(".".join)
WILD = [
    "*",
    "**",
    "?",
    "??",
    "a*",
    "*b",
    "[ab]",
    "[!a]",
    "[ab1][a-b]",
    "*[!-]",
    "a**b",
    "***",
    "[]a]",
    "[!]a]",
    "[[]",
    "[!!]",
]
LEVELS = st.sampled_from(["*", "**", "?", "*?"]) | st.sampled_from(WILD) | st.text("ab1*?[]!-^\\", max_size=6)


@st.composite
def globs_and_paths(draw: st.DrawFn) -> tuple[str, list[str]]:
    """Some paths and a glob made from one of them, so that it often matches."""
    paths = draw(st.lists(PATHS.filter(lambda path: path[:1] != "!"), min_size=3, max_size=8, unique=True))
    levels = [draw(st.just(level) | LEVELS) for level in draw(st.sampled_from(paths)).split(".")]
    for _ in range(draw(st.integers(0, 2))):
        levels.insert(draw(st.integers(0, len(levels))), "**")
    return ".".join(levels), paths


@settings(max_examples=400, deadline=None)
@given(globs_and_paths())
@example(("**", [""]))
@example(("*", ["", "a"]))
@example(("**.a.**", ["a", "b.a", "a.b", "b.a.b", "b"]))
@example(("**.**.a", ["a", "b.a", "b.b.a"]))
@example(("[+-9]", ["1", "-", "a"]))
@example(("[a--]", ["a"]))
@example(("a[!x]b", ["a.b", "ayb"]))
@example(("a[+-9]b", ["a.b", "a1b"]))
@example(("a?b", ["a.b", "a-b"]))
@example(("a..b", ["a.a.b", "a.b"]))
def test_a_glob_matches_as_an_independent_matcher_does(glob_and_paths):
    glob, paths = glob_and_paths
    if glob.startswith("!") or glob in paths:
        return
    expected = [path for path in paths if naive_match(glob.split("."), path.split(".") if path else [])]
    try:
        found = match_paths(glob, paths)
    except SiteError as error:
        assert "cannot be read: bad character range" in str(error) or expected == []
    else:
        assert found == expected


@settings(max_examples=200, deadline=None)
@given(
    st.lists(st.sampled_from(["a", "a.*", "**.b", "re:a.*", "!a", "!**.b", "!a.a"]), min_size=1, max_size=5),
    st.randoms(),
)
def test_a_list_means_the_same_in_any_order(patterns, random):
    paths = ["", "a", "b", "a.a", "a.b", "a.b.b", "c"]
    parts = {text: set(match_paths(text.removeprefix("!"), paths)) for text in patterns}
    includes = [parts[text] for text in patterns if not text.startswith("!")] or [set(paths)]
    left = set().union(*includes).difference(*(parts[text] for text in patterns if text.startswith("!")))
    shuffled = random.sample(patterns, len(patterns))
    if left:
        assert match_paths(shuffled, paths) == [path for path in paths if path in left]
    else:
        with pytest.raises(SiteError, match="nothing is left"):
            match_paths(shuffled, paths)


@settings(max_examples=300, deadline=None)
@given(st.text("ab*?[]!:.re", max_size=8))
def test_no_text_ends_in_anything_but_paths_or_a_site_error(text):
    with contextlib.suppress(SiteError):
        assert set(match_paths(text, ["", "a", "b", "a.b", "re"])) <= {"", "a", "b", "a.b", "re"}


# ---------------------------------------------------------------- nearest names


@pytest.mark.parametrize(
    ("name", "names", "expected"),
    [
        ("layr1.conv1", ["layer1.conv1", "layer1.conv2", "fc"], ["layer1.conv1", "layer1.conv2"]),
        ("conv1", ["features.deep.down.conv1", "fc"], ["features.deep.down.conv1"]),
        ("model.encoder.attn", ["encoder.attn", "fc"], ["encoder.attn"]),
        ("RELU", ["relu", "fc"], ["relu"]),
        ("a1", ["a2", "a3", "a4", "a5"], []),
        ("aa1", ["aa2", "aa3", "aa4", "aa5"], ["aa2", "aa3", "aa4"]),
        ("aa1", ["aa2", "aa2"], ["aa2"]),
        ("layer1.0.conv1.weight", ["layer1.0.conv1", "fc"], ["layer1.0.conv1"]),
        ("zzz", ["a", "b"], []),
        ("", ["a", "b"], []),
        ("x", [], []),
    ],
)
def test_nearest(name, names, expected):
    assert nearest(name, names) == expected


def test_nearest_gives_as_many_as_wanted():
    assert nearest("aa1", (f"aa{i}" for i in range(2, 9)), count=1) == ["aa2"]
    assert nearest("aa1", ["aa2"], count=0) == []


# ---------------------------------------------------------------- size and typing


def transformer(count: int) -> nn.Module:
    """A model of ``count`` blocks with ten modules each."""
    names = ("q", "k", "v", "o", "up", "down", "act", "norm1", "norm2")
    blocks = (nn.ModuleDict({name: nn.Identity() for name in names}) for _ in range(count))
    return nn.ModuleDict({"layers": nn.ModuleList(blocks)})


def test_twenty_thousand_modules_take_no_noticeable_time():
    model = transformer(2000)
    patterns = ["layers.*.[qkv]", "**.up", "**.layers.**.norm?:input", r"re:layers\.\d+", nn.ModuleDict, "!layers.7.**"]
    start = time.process_time()
    found = resolve(model, patterns)
    assert time.process_time() - start < 2.0
    assert len(found) == 1 + 1999 * (1 + 3 + 1 + 2)


def test_a_misspelt_name_among_twenty_thousand_is_told_soon():
    paths = [
        f"layers.{i}.{name}" for i in range(2000) for name in ("q", "k", "v", "up", "down", "act", "norm1", "norm2")
    ]
    start = time.process_time()
    assert nearest("layers.55.nrm1", paths)[0] == "layers.55.norm1"
    assert time.process_time() - start < 4.0


@pytest.mark.parametrize("glob", ["**.a.**.**.a.**.b*b****b*c", "**." * 12 + "c", "*" * 50 + "c"])
def test_many_stars_do_not_make_a_glob_slow(glob):
    start = time.process_time()
    with pytest.raises(SiteError):
        match_paths(glob, [".".join("a" * 40), "b" * 200])
    assert time.process_time() - start < 2.0


def test_the_type_of_a_pattern_can_be_looked_up():
    assert typing.get_type_hints(resolve)["sites"] is not None


def test_the_public_names_are_those_in_all():
    assert sorted(sites.__all__) == sorted(
        ["PORTS", "ROOT_LABEL", "Pattern", "Site", "canonical_paths", "check_ports", "label", "match_paths",
         "named_exactly", "nearest", "resolve", "resolve_paths"]
    )  # fmt: skip
