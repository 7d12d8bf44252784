// Package oci reads container images (OCI layouts, archives of docker save,
// registries) and merges their layers into tar streams that an image writer takes.
//
// # Merging
//
// A layer of a container image is a tar in which .wh.NAME removes NAME of the
// layers below and .wh..wh..opq all that a directory has below (image-spec,
// layer.md). Layers are read twice, and never unpacked to disk:
//
//  1. NewPlan reads the headers from the lowest layer to the topmost and keeps the
//     tree that unpacking would give: for each name the layer and entry it comes
//     from. Digests and limits are checked on the way, before anything is written.
//  2. Plan.Write reads the layers again and passes on those entries that survived,
//     each once, hard links as links to the first name of their file.
//
// The alternatives read once: from the bottom, storing content that a higher layer
// then replaces (dead weight in an immutable image for ever), or from the top with a
// set of hidden names, which cannot serve a hard link in a low layer to a file that a
// higher layer replaced. The second reading costs decompression (some 300 MB/s of
// gzip), gives exact results, and tells sizes in advance, which the collapse rule needs.
//
// Consecutive layers are merged into one group as long as their files add up to at
// most the threshold; a group above the lowest keeps its whiteouts. A file to which
// a hard link of a higher group leads is stored in that group again, as overlayfs does.
//
// Memory is about 250 bytes a name, apart from what the writer of the image needs.
//
// # Where unpackers differ
//
// A name below something that a lower layer has as a link or file makes a directory
// there and hides it, as stacked directories of overlayfs do; links are never
// followed. Whiteouts concern lower layers only, wherever in their layer they are.
package oci
