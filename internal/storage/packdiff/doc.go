// Package packdiff decides what of a sandbox's writable layer becomes a layer: which paths are residue and stay behind, how
// the rest differs from the layers below, and what in it would hurt others or give something away.
//
// Deciding is pure: Rules match paths, a Cleaner answers the writer of the image name by name. Examine then reads the image
// that was written, and the layers below, and not the sandbox: it needs nothing frozen, and judges what is really packed.
//
// Everything that is looked at was made by somebody hostile. Layers below are read name by name below descriptors of their
// directories, following nothing; lists, patterns and what is read of files are bounded.
//
// What cleaning does with what lies below:
//
//   - A path that the sandbox made is absent from the new layer.
//   - A path of a lower layer that the sandbox changed is as in that layer: the change is absent.
//   - A path of a lower layer that the sandbox deleted stays deleted: whiteouts and opaque directories are never cleaned.
package packdiff
