# SPDX-License-Identifier: Apache-2.0
"""Keep bytes under string keys: the leaf package of the house, which imports nothing else of it.

The folder is top level, the import name is ``bundler.backends`` (``bundler/backends`` is a relative
link to here), so that a folder named ``backends`` in somebody else's project is never mistaken for
this one.

`bundler/store/store_urls.py` opens byte stores for the rooms above; `port.py` says what all of them
offer.
"""

if __name__ == "backends":
    _MESSAGE = (
        "the folder backends/ is imported as bundler.backends; write `import bundler.backends`"
        " instead of `import backends`"
    )
    raise ImportError(_MESSAGE, name=__name__)
