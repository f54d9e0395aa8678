"""Config files: safe, inherited, and with errors that name the file."""

import pytest

from trainkit.config import CfgNode, ConfigError, get_cfg
from trainkit.config.yaml_files import parse_literal


@pytest.fixture
def write(tmp_path):
    def write_file(name, text):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)
        return path

    return write_file


def merged(path):
    cfg = get_cfg()
    cfg.merge_from_file(path)
    return cfg


def test_scientific_numbers_are_numbers_and_tuples_are_read_where_a_list_is_wanted(write):
    text = "SOLVER: {BASE_LR: 1e-3, MOMENTUM: 1, OPTIMIZER: {EPS: 1e-8, BETAS: [0.9, 1E2]}}\nOUTPUT_DIR: '1e-3'"
    cfg = merged(write("a.yaml", text))
    assert cfg.SOLVER.BASE_LR == 0.001
    assert cfg.SOLVER.MOMENTUM == 1.0
    assert cfg.OUTPUT_DIR == "1e-3"
    assert cfg.SOLVER.OPTIMIZER == {"NAME": "SGD", "EPS": 1e-8, "BETAS": [0.9, 100.0]}
    text = "SOLVER: {STEPS: '(5, 9)'}\nDATASETS:\n  TRAIN: ('a',)\nTEST: {EVALUATORS: ['b']}\nOUTPUT_DIR: (a,)"
    cfg = merged(write("a.yaml", text))
    assert cfg.SOLVER.STEPS == (5, 9)
    assert cfg.DATASETS.TRAIN == ("a",)
    assert cfg.TEST.EVALUATORS == ["b"]
    assert cfg.OUTPUT_DIR == "(a,)"


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("null", None),
        ("#fff", "#fff"),
        ("", ""),
        ("true", True),
        ("[a, 1e-3]", ["a", 0.001]),
        ("(1, 2)", (1, 2)),
        ("a: [b", "a: [b"),
    ],
)
def test_a_value_of_the_command_line_is_a_literal_or_yaml_or_text(text, value):
    assert parse_literal(text) == value


@pytest.mark.parametrize(
    "payload",
    [
        "!!python/object/apply:os.mkdir ['{target}']",
        "!!python/name:os.mkdir",
        "!!python/tuple [1, 2]",
    ],
)
def test_yaml_that_names_code_is_refused_and_not_run(write, tmp_path, payload):
    target = tmp_path / "made"
    path = write("evil.yaml", "SEED: 1\nOUTPUT_DIR: " + payload.format(target=target))
    for load in (
        merged,
        CfgNode.load_yaml_with_base,
        lambda file: CfgNode.load_cfg(file.read_text()),
    ):
        with pytest.raises(
            ConfigError, match="could not determine a constructor for the tag .*(\n.*)* line 2"
        ):
            load(path)
    assert not target.exists()
    with pytest.raises(ConfigError, match=r"evil\.yaml"):
        merged(path)


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("SEED: 1\nSOLVER: [1", r"a\.yaml: (.*\n)+.*line 2"),
        ("- 1\n- 2", r"a\.yaml: got .*list.*; accepted: a mapping"),
        ("SEED: 1\nSEED: 2", r"a\.yaml: the key 'SEED' is twice\n.*line 2"),
        (
            "SOLVER: {BASE_LRR: 1}",
            r"a\.yaml: unknown key SOLVER\.BASE_LRR; did you mean 'SOLVER\.BASE_LR'\?",
        ),
        ("SOLVER:", r"a\.yaml: SOLVER: got None \(NoneType\); accepted: a node"),
        ("_BASE_: gone.yaml", r"cannot read the config file '.*gone\.yaml': No such file"),
    ],
)
def test_a_bad_file_is_an_error_that_names_it(write, tmp_path, text, message):
    with pytest.raises(ConfigError, match=message):
        merged(write("a.yaml", text))
    with pytest.raises(ConfigError, match="cannot read the config file"):
        merged(tmp_path)
    (tmp_path / "binary.yaml").write_bytes(b"\xff\xfe\x80")
    with pytest.raises(ConfigError, match=r"binary\.yaml"):
        merged(tmp_path / "binary.yaml")


def test_anchors_and_merge_keys_work_and_an_empty_file_changes_nothing(write):
    text = "MODEL:\n  A: &a {X: 1, Y: 1}\n  B: &b {<<: *a, Y: 2, LONG: 2}\n  C: {<<: *b, X: 3}\n  D: &d {LONG: 4}"
    cfg = merged(write("a.yaml", text + "\n  E: {<<: [*d, *b]}"))  # the first that has a key counts
    assert cfg.MODEL.C == {"X": 3, "Y": 2, "LONG": 2}
    assert cfg.MODEL.E == {"X": 1, "Y": 2, "LONG": 4}
    assert merged(write("a.yaml", "")) == get_cfg()


def test_inherited_files_come_first_in_their_order(write, tmp_path, monkeypatch):
    monkeypatch.setenv("HOME", str(tmp_path))
    write("base/one.yaml", "SEED: 1\nVIS_PERIOD: 1\nSOLVER: {BASE_LR: 0.5}\nMODEL: {W: 1}")
    write("base/two.yaml", "_BASE_: one.yaml\nSEED: 2\nMODEL: {W: two}")
    write("home.yaml", "OUTPUT_DIR: home\nSEED: 3")
    cfg = merged(write("top.yaml", "_BASE_: [base/two.yaml, ~/home.yaml]\nSOLVER: {MOMENTUM: 0.8}"))
    assert cfg.VIS_PERIOD == 1
    assert cfg.SEED == 3
    assert cfg.OUTPUT_DIR == "home"
    assert cfg.MODEL.W == "two"
    assert cfg.SOLVER.BASE_LR == 0.5
    assert cfg.SOLVER.MOMENTUM == 0.8


def test_delete_replaces_an_inherited_node_and_keeps_the_defaults(write):
    base = "SOLVER: {BASE_LR: 0.5, OPTIMIZER: {NAME: Adam, BETAS: [0.9, 0.999]}, CLIP_GRADIENTS: {ENABLED: true}}"
    write("base.yaml", base)
    node = "OPTIMIZER: {%s NAME: RMSprop, ALPHA: 0.9}, CLIP_GRADIENTS: {%s CLIP_VALUE: 2}"
    kept = merged(write("kept.yaml", "_BASE_: base.yaml\nSOLVER: {" + node % ("", "") + "}"))
    assert kept.SOLVER.OPTIMIZER == {"NAME": "RMSprop", "BETAS": [0.9, 0.999], "ALPHA": 0.9}
    assert kept.SOLVER.CLIP_GRADIENTS.ENABLED is True
    mark = "_DELETE_: True,"
    cfg = merged(write("replaced.yaml", "_BASE_: base.yaml\nSOLVER: {" + node % (mark, mark) + "}"))
    assert cfg.SOLVER.OPTIMIZER == {"NAME": "RMSprop", "ALPHA": 0.9}
    assert cfg.SOLVER.CLIP_GRADIENTS == {
        "ENABLED": False,
        "CLIP_TYPE": "value",
        "CLIP_VALUE": 2.0,
        "NORM_TYPE": 2.0,
    }
    assert cfg.SOLVER.BASE_LR == 0.5


def test_reading_a_config_imports_nothing(write, monkeypatch, tmp_path):
    monkeypatch.syspath_prepend(tmp_path)
    write("imported_by_reading.py", "raise RuntimeError")
    cfg = merged(write("a.yaml", "IMPORTS: [imported_by_reading]"))
    assert cfg.IMPORTS == ["imported_by_reading"]


def test_a_file_that_inherits_from_itself_is_an_error_that_names_the_loop(write, tmp_path):
    write("a.yaml", "_BASE_: sub/b.yaml")
    write("sub/b.yaml", "_BASE_: [../plain.yaml, ../a.yaml]")
    write("plain.yaml", "SEED: 1")
    with pytest.raises(
        ConfigError, match=r"inherits from itself: .*a\.yaml -> .*b\.yaml -> .*a\.yaml;"
    ):
        merged(tmp_path / "a.yaml")
    own = write("own.yaml", "_BASE_: own.yaml")
    with pytest.raises(ConfigError, match=r"itself: .*/own\.yaml -> .*/own\.yaml;"):
        CfgNode.load_yaml_with_base(own)
    (tmp_path / "link.yaml").symlink_to(write("linked.yaml", "_BASE_: link.yaml"))
    with pytest.raises(ConfigError, match=r"itself: .*linked\.yaml -> .*link\.yaml;"):
        merged(tmp_path / "linked.yaml")


def test_a_base_that_two_files_share_is_no_loop(write):
    write("root.yaml", "SEED: 1\nVIS_PERIOD: 1")
    write("left.yaml", "_BASE_: root.yaml\nSEED: 2")
    write("right.yaml", "_BASE_: root.yaml")
    cfg = merged(write("top.yaml", "_BASE_: [left.yaml, right.yaml]"))
    assert cfg.SEED == 1
    assert cfg.VIS_PERIOD == 1


@pytest.mark.parametrize("base", ["3", "null", "[a.yaml, 3]", "{A: b}"])
def test_a_base_that_is_no_path_is_an_error_that_names_the_file(write, base):
    with pytest.raises(ConfigError, match=r"a\.yaml: _BASE_: got .*; accepted: a path, or a list"):
        merged(write("a.yaml", f"_BASE_: {base}"))


def test_none_in_a_file_is_no_text_as_on_the_command_line(write):
    text = (
        "CHECKPOINT: {DIR: None, BEST_METRIC: None}\nMODEL: {WEIGHTS: 'None'}\nHOOKS: [{A: None}]"
    )
    cfg = merged(write("a.yaml", text))
    assert cfg.CHECKPOINT.DIR is None
    assert cfg.CHECKPOINT.BEST_METRIC is None
    assert cfg.MODEL.WEIGHTS == "None"
    assert cfg.HOOKS == [{"A": None}]
