"""A page on this machine: drop a prediction file on it, and get a report and a calibrator.

``calibrant ui`` serves it. The server (Starlette and uvicorn, the extra ``ui``) answers to this
machine alone, and a process of its own works on the files, one at a time.
"""

from calibrant.ui.server import serve as serve
