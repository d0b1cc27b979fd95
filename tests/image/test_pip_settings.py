"""pip's settings become those of a build."""

from pathlib import Path

from pip_settings import parse

_LISTED = """\
:env:.cert='/certs/environment.pem'
:env:.find-links='/wheels'
global.cert='/certs/file.pem'
global.disable-pip-version-check='true'
global.extra-index-url='file:///packages/simple https://packages.example.org/simple'
"""


def test_the_build_is_given_the_places_of_packages_and_the_certificates():
    settings = parse(_LISTED)
    assert settings.text.splitlines() == [
        "[global]",
        "extra-index-url = file:///packages/simple https://packages.example.org/simple",
        "find-links = /wheels",
        "cert = /run/secrets/ca_bundle",
    ]
    assert settings.certificates == Path("/certs/environment.pem")


def test_folders_of_this_machine_are_seen_by_the_build():
    assert parse(_LISTED).folders == (Path("/packages"), Path("/wheels"))


def test_the_places_that_an_image_must_not_name():
    assert parse(_LISTED).places == (
        *("file:///packages/simple", "https://packages.example.org/simple", "/wheels"),
    )


def test_without_settings_there_is_nothing_to_pass():
    settings = parse("")
    assert settings.text == "[global]\n"
    assert settings.certificates is None
    assert settings.folders == settings.places == ()
