#!/bin/sh
exec python3 -I -S -B "${GYRE_TESTS:-/tests}/grade.py"
