"""Copy past the cache, and compare checksums."""

import numpy as np

from beluga.coherence import crc32c, fence, flush, ntstore_copy

source = np.arange(4096, dtype=np.float32)
target = bytearray(source.nbytes)
ntstore_copy(target, source)  # past the cache, with a fence
print(crc32c(target) == crc32c(source))  # True
print(crc32c(source[1024:], crc32c(source[:1024])) == crc32c(source))  # True: in two parts
target[0] = 1
flush(target)
fence()  # now the memory has the new byte
