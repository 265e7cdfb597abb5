"""Reading messages and their translations from catalogs, splitting them, and looking translations of them up."""

import struct

import message_pairs
import pytest
from message_pairs import Pair, installed_catalogs, is_usable, meaning, read_catalog, read_pairs, split
from nearest_pair import most_frequent_translation, nearest_pairs


def catalog(messages, order="<"):
    """Return the bytes of a gettext catalog: a header, the offsets of messages and of translations, the texts."""
    header, texts = 28, b""
    tables = [[], []]
    start = header + 16 * len(messages)
    for table, column in zip(tables, zip(*messages.items(), strict=True), strict=True):
        for text in column:
            table.append((len(text.encode()), start + len(texts)))
            texts += text.encode() + b"\0"
    numbers = [number for table in tables for entry in table for number in entry]
    fields = [0x950412DE, 0, len(messages), header, header + 8 * len(messages), 0, start, *numbers]
    return struct.pack(f"{order}{len(fields)}I", *fields) + texts


CATALOGS = {
    "Django": {
        "django/conf/locale/zh_Hans/LC_MESSAGES/django.mo": catalog(
            {
                "": "Content-Type: text/plain; charset=UTF-8\n",
                "Save": "保存",
                "month\x04May": "五月",
                "%d hour\0%d hours": "%d 小时",
                "Hello, %(name)s": "您好 %(name)s",
                "URL": "URL",
                "Untranslated": "",
            }
        ),
        "django/conf/locale/ko/LC_MESSAGES/django.mo": catalog({"Save": "저장"}),
        "django/__init__.py": b"raise AssertionError('imported')",
    },
    "wagtail": {"wagtail/locale/zh_Hans/LC_MESSAGES/django.mo": catalog({"SAVE…": "储存", "Sign in": "登录"})},
    "pycountry": {
        "pycountry/locales/zh_CN/LC_MESSAGES/iso3166-1.mo": catalog({"China": "中国"}, order=">"),
        "pycountry/locales/zh_CN/LC_MESSAGES/iso3166-2.mo": catalog({"Kumamoto": "熊本县"}),
    },
    "jupyterlab-language-pack-zh-CN": {
        "jupyterlab_language_pack_zh_CN/locale/zh_CN/LC_MESSAGES/notebook.mo": catalog({"Open": "打开" * 40})
    },
}


@pytest.fixture
def catalogs(install):
    for name, files in CATALOGS.items():
        install(name, files)


def test_the_first_translation_of_a_meaning_is_read_if_it_is_short_free_of_format_and_no_rare_name(
    catalogs,
):
    assert read_pairs("zh", 60) == [
        Pair("Save", "保存"),
        Pair("May", "五月"),
        Pair("Sign in", "登录"),
        Pair("China", "中国"),
    ]


def test_a_catalog_yields_its_messages_without_plural_forms(catalogs):
    path, *_ = installed_catalogs("zh")
    assert [pair.english for pair in read_catalog(path)] == ["Save", "May", "Hello, %(name)s", "URL", "Untranslated"]


def test_one_missing_package_is_named_alone(install, monkeypatch):
    install("wagtail", {"wagtail/empty": b""})
    wanted = {"wagtail==8.0.1": "wagtail", "absent-messages==1.0": "absent_messages"}
    monkeypatch.setitem(message_pairs.REQUIREMENTS, "ko", wanted)
    with pytest.raises(SystemExit, match=r"--no-deps absent-messages==1\.0$"):
        installed_catalogs("ko")


def test_what_is_no_catalog_is_refused(tmp_path):
    (tmp_path / "x.mo").write_bytes(b"msgid")
    with pytest.raises(ValueError, match=r"x\.mo is not a gettext catalog: it begins with b'msgi'"):
        list(read_catalog(tmp_path / "x.mo"))


@pytest.mark.parametrize(
    ("language", "translation"), [("zh", "保存"), ("ko", "저장"), ("ar", "حفظ"), ("zh", "Python 3 代码")]
)
def test_a_translation_is_usable_if_its_letters_are_of_its_language(language, translation):
    assert is_usable(Pair("Save", translation), language, 60)
    other = {"zh": "ko", "ko": "ar", "ar": "zh"}[language]
    assert not is_usable(Pair("Save", translation), other, 60)


@pytest.mark.parametrize(
    "english", ["{count} files", "<b>Save</b>", "a\nb", "100%", "&nbsp;Save", "`code`", "1 - 2", ""]
)
def test_a_message_with_format_or_without_words_is_not_usable(english):
    assert not is_usable(Pair(english, "保存"), "zh", 60)


def test_case_spaces_and_punctuation_do_not_change_a_meaning():
    assert meaning("Save  as…") == meaning("SAVE AS:") == "saveas"
    assert meaning("Saves") != meaning("Save")


def test_no_meaning_is_in_two_splits_and_all_pairs_are_in_one():
    pairs = [Pair(text, "译") for number in range(1000) for text in (f"Text {number}", f"TEXT {number}!")]
    splits = split(pairs)
    meanings = {name: {meaning(pair.english) for pair in part} for name, part in splits.items()}
    assert sum(map(len, splits.values())) == 2000
    assert sum(map(len, meanings.values())) == 1000
    assert 40 < len(meanings["test"]) < 100
    assert 10 < len(meanings["validation"]) < 60


def test_a_pair_stays_in_its_split_when_others_come():
    few, many = ([Pair(f"Text {number}", "译") for number in range(count)] for count in (100, 300))
    for name, part in split(few).items():
        assert set(part) <= set(split(many)[name])


MEMORY = [
    Pair("Open file", "打开文件"),
    Pair("Save file", "保存文件"),
    Pair("Save document", "保存文件"),
    Pair("Go", "去"),
]


def test_the_nearest_message_shares_most_trigrams_whatever_its_case():
    messages = ["save the file", "open a File", "go on", "§"]
    assert nearest_pairs(MEMORY, messages) == [MEMORY[1], MEMORY[0], MEMORY[3], MEMORY[0]]


def test_the_most_frequent_translation_is_that_of_most_pairs():
    assert most_frequent_translation(MEMORY) == "保存文件"
