# SPDX-License-Identifier: Apache-2.0
"""How a kernel is launched: `plan_builder` makes a `LaunchPlan` of what was recorded and what the
binary declares, and `parameter_buffer` packs by it.
"""
