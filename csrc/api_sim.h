/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * What tests may call in the simulator only.
 */
