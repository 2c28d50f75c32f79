"""What apt plans, reads from and would take from another suite."""

from __future__ import annotations

from trainyard import apt

SIMULATION = """\
NOTE: This is only a simulation!
Inst libc6 [2.36-9+deb12u10] (2.41-12 Debian:13.0/stable [amd64]) []
Inst docker.io (26.1.5+dfsg1-9+b3 Debian:13.0/stable [amd64])
Remv old-thing [1.0] []
Conf docker.io (26.1.5+dfsg1-9+b3 Debian:13.0/stable [amd64])
"""


def test_what_apt_would_change_is_read_from_its_simulation() -> None:
    plan = apt.parse_simulation(SIMULATION)
    assert plan == apt.AptPlan(("docker.io",), ("libc6",), ("old-thing",))
    message = apt.refusal(["docker.io"], plan)
    assert "libc6" in message
    assert "old-thing" in message


def test_borrowed_packages_are_pinned_and_all_others_of_that_suite_kept_away() -> None:
    pins = apt.BorrowedSuite("trixie", "http://mirror/debian", ("docker.io",)).preferences()
    assert "Package: *\nPin: release n=trixie\nPin-Priority: 50\n" in pins
    assert "Package: docker.io\nPin: release n=trixie\nPin-Priority: 990\n" in pins


DEB822 = """\
Types: deb
# a comment
URIs: http://mirror.example/debian/
Suites: bookworm
 bookworm-updates
Components: main

Types: deb
URIs: http://mirror.example/debian-security
Suites: bookworm-security

Types: deb-src
URIs: http://sources.example/debian
Suites: bookworm

Enabled: no
Types: deb
URIs: http://off.example/debian
Suites: bookworm
"""


def test_both_formats_of_apt_sources_are_read() -> None:
    found = apt.parse_sources(DEB822)
    assert found == [
        apt.AptSource("http://mirror.example/debian", ("bookworm", "bookworm-updates")),
        apt.AptSource("http://mirror.example/debian-security", ("bookworm-security",)),
    ]
    line = "# deb http://no/debian x main\ndeb [arch=amd64 signed-by=/k] http://yes/debian trixie main"
    assert apt.parse_sources(line) == [apt.AptSource("http://yes/debian", ("trixie",))]


def test_the_hosts_mirror_is_used_but_never_one_with_a_password() -> None:
    found = apt.parse_sources(DEB822)
    assert apt.debian_mirrors(found) == (
        "http://mirror.example/debian",
        "http://mirror.example/debian-security",
    )
    secret = [apt.AptSource("https://me:pass@mirror.example/debian", ("trixie",))]
    assert apt.debian_mirrors(secret)[0] == apt.DEBIAN_MIRROR
