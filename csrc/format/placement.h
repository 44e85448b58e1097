/* SPDX-License-Identifier: Apache-2.0
 * Copyright The Beluga Authors
 *
 * How the linear range lies on the devices: the bits of bl_geometry.interleaved.
 */
#ifndef BL_PLACEMENT_H
#define BL_PLACEMENT_H

enum bl_placement {
    BL_PLACEMENT_INTERLEAVED = 1, /* stripe by stripe over the devices, not device after device */
    BL_PLACEMENT_METADATA = 2   /* device 0 has all bytes before the data, and no data stripe; the
                                 * others have only data stripes */
};

#endif
