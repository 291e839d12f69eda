# SPDX-License-Identifier: Apache-2.0
"""The command `report`: one HTML file that shows what is in a bundle, and opens anywhere.

`report_command.py` is the command; `kernel_figures.py` gathers figures, `text_archive.py` packs the
texts of kernels, `report_page.py` lays out areas and puts all of it into the page whose parts lie
in `page/`.
"""
