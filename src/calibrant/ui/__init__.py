"""A page on this machine: drop a prediction file on it, and get a report and a calibrator.

``calibrant ui`` serves it, as does :func:`calibrant.ui.app.serve`. The server (Starlette and
uvicorn, the extra ``ui``) answers to this machine alone, and a process of its own works on the
files, one at a time.
"""
