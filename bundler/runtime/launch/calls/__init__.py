# SPDX-License-Identifier: Apache-2.0
"""What a call needs: `call_key` and `argument_types` tell calls apart, `specialization_choice` finds the
kernel for one, `argument_flattening` makes the launcher's values of its arguments.
"""
