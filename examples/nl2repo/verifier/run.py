"""Runs upstream's tests on the agent's package and says to grade.py what each came to. Nobody trusts this process: see there.

Everything of pytest is loaded from this directory before the package can be, and the workspace is the last place where modules are looked for.
"""

import json
import os
import sys
import unittest.mock  # noqa: F401 (before anything of the agent's)

import pytest


def reporter(token, out, skip, keep):
    write, dumps, outcomes = os.write, json.dumps, []

    def say(word, test=""):
        write(out, f"{token} {dumps([word, test])}\n".encode())

    class Reporter:
        def pytest_collection_modifyitems(self, items):
            items[:] = [item for item in items if item.nodeid not in skip and (not keep or item.nodeid in keep or item.nodeid.startswith("canary/"))]

        def pytest_runtest_logstart(self, nodeid):
            outcomes.clear()
            say("start", nodeid)

        def pytest_runtest_logreport(self, report):
            outcomes.append((report.when, report.outcome))

        def pytest_runtest_logfinish(self, nodeid):
            good = ("call", "passed") in outcomes and all(outcome == "passed" for _, outcome in outcomes)
            say("passed" if good else "failed", nodeid)

        def pytest_unconfigure(self):
            say("end")

    return Reporter()


def main():
    order = json.loads(sys.argv.pop())
    plugin = reporter(sys.stdin.read(), order["out"], frozenset(order["skip"]), frozenset(order["keep"]))
    os.set_inheritable(order["out"], False)
    tests = os.path.dirname(sys.path[0])  # noqa: PTH120 (pathlib could be anyone's by now, os cannot)
    sys.path += [order["work"], os.path.join(order["work"], "src")]  # noqa: PTH118
    options = ["-q", "--tb=line", "--assert=plain", "-p", "no:cacheprovider", "--continue-on-collection-errors"]
    options += ["-c", os.devnull, f"--rootdir={tests}", f"--confcutdir={tests}"]
    pytest.main([*options, *(f"{tests}/{target}" for target in [*order["targets"], "canary"])], plugins=[plugin])


if __name__ == "__main__":
    main()
