package scenario

import (
	"bytes"
	"context"
	"encoding/json"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"os/exec"
	"path/filepath"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"testing"
	"time"

	v1 "github.com/google/go-containerregistry/pkg/v1"
)

// importMemory is what a server may take while it imports.
const importMemory = 256 << 20

// largeRun is an image in a registry and a node that imports it.
type largeRun struct {
	*testing.T
	large    bool
	dir      string
	image    *treeImage
	registry *imageRegistry
	node     *ownNode
}

// TestImageOfARegistry: an image, pushed to a registry, becomes a layer, also when registry and server are killed meanwhile, and what a sandbox
// sees of it is what GNU tar unpacks, name by name. A version of it that changed little moves and stores little.
//
// The image is small in make test. With HARENA_SOAK=1 or HARENA_LARGE=1 it is made of gigabytes of Debian packages (5 minutes,
// once a machine: they stay in the user's cache directory) with a file of more than 4 GiB.
func TestImageOfARegistry(t *testing.T) {
	if os.Geteuid() != 0 {
		t.Skip("it makes devices: root is needed")
	}
	dir, err := os.MkdirTemp("/var/tmp", "harena-image-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(dir) })
	r := &largeRun{T: t, dir: dir, large: count(0, 1) == 1 || os.Getenv("HARENA_LARGE") != "", image: newTreeImage(t, dir)}
	r.node = secondNode(t)
	r.registry = newImageRegistry(t, dir)
	r.step("make the image", r.build)
	ref, img := "", v1.Image(nil)
	r.step("push it", func() {
		img = r.image.image(r.image.layers...)
		ref = r.push("team/large:1", img)
	})
	first := ""
	r.step("import it with interruptions", func() { first = r.interrupted(ref, img) })
	r.step("import it again", func() {
		r.registry.after(0, nil)
		if got := r.importRef("image:1", ref); got != first {
			t.Errorf("what is there was made again: %s is %s", first, got)
		}
		r.movesNothing()
	})
	r.step("import it as one layer", func() {
		r.importRef("merged:1", ref, "--collapse", "60GB")
		r.movesNothing()
	})
	want := r.want()
	r.step("compare the layers of layers", func() { r.compare("image:1", want, false) })
	r.step("compare the one layer", func() { r.compare("merged:1", want, true) })
	r.step("use it", r.use)
	r.step("change it", func() { r.changed(img) })
}

func (r *largeRun) step(what string, f func()) {
	r.Helper()
	began := time.Now()
	f()
	r.Logf("%s: %.1f s; server's memory %d MiB at most", what, time.Since(began).Seconds(), r.memory()>>20)
	if r.Failed() {
		r.FailNow()
	}
}

// build makes the tree and its layers.
func (r *largeRun) build() {
	m := r.image
	big := int64(40 << 20)
	if r.large {
		big = 4<<30 + 123<<20
		m.largeBase()
	} else {
		r.smallBase()
	}
	m.script("before.sh")
	m.pack(packed{compression: "zstd", paths: []string{"srv"}})
	m.script("change.sh")
	m.pack(packed{
		compression: "gzip", dirs: []string{"srv/kept"},
		paths: []string{"srv/opaque", "srv/was-dir", "srv/was-file", "srv/was-link", "srv/a", "srv/b", "srv/odd names", "srv/nested"},
		flags: []string{"--exclude=srv/b/file-of-below"},
		marks: []string{"srv/.wh.gone", "srv/opaque/.wh..wh..opq", "srv/kept/.wh.other", "srv/kept/.wh.was-device"},
		links: map[string]string{"srv/b/file-of-below": "srv/kept/file"},
	})
	self, err := os.Executable()
	if err != nil {
		r.Fatal(err)
	}
	// The end of the file is beyond what 32 bits count.
	m.sh(`mkdir srv/large srv/sparse; truncate -s "$1" srv/large/file srv/sparse/file
for at in 0 1000000 $(($1 - 200000)); do head -c 150000 /dev/urandom | dd of=srv/large/file bs=64K oflag=seek_bytes seek=$at conv=notrunc status=none; done
truncate -s 64M srv/sparse/file; echo here | dd of=srv/sparse/file bs=1M seek=50 conv=notrunc status=none
cp "$2" srv/large/list`, fmt.Sprint(big), self)
	m.pack(packed{compression: "zstd", paths: []string{"srv/large"}})
	m.pack(packed{compression: "none", paths: []string{"srv/sparse"}, flags: []string{"--sparse"}})
}

// smallBase makes the lowest layers of this machine's shell and noise.
func (r *largeRun) smallBase() {
	r.image.sh(`cp -a "$1"/. .`, smallTree(r.T, 24<<20))
	r.image.pack(packed{compression: "gzip", paths: []string{"."}, flags: []string{"--exclude=./root/noise"}})
	r.image.pack(packed{compression: "zstd", paths: []string{"root/noise"}})
}

func (m *treeImage) script(name string) {
	m.t.Helper()
	b, err := os.ReadFile(filepath.Join("testdata", name))
	if err != nil {
		m.t.Fatal(err)
	}
	m.sh(string(b))
}

func (r *largeRun) push(repo string, img v1.Image) string {
	r.Helper()
	ctx, cancel := context.WithTimeout(r.Context(), 10*time.Minute)
	defer cancel()
	ref, err := r.registry.push(ctx, repo, img)
	if err != nil {
		r.Fatal(err)
	}
	return ref
}

// tryImport runs the CLI; layers of an image are merged up to a size that makes several of them.
func (r *largeRun) tryImport(name, ref string, flags ...string) (digest string, err error) {
	if len(flags) == 0 && !r.large {
		flags = []string{"--collapse", "20MB"}
	}
	ctx, cancel := context.WithTimeout(r.Context(), slowly(10*time.Minute))
	defer cancel()
	cmd := exec.CommandContext(ctx, program("harena"), append([]string{"layer", "import", "--name", name, "registry://" + ref}, flags...)...)
	cmd.Env = append(os.Environ(), "HARENA_URL="+r.node.url, "HARENA_TOKEN="+r.node.token)
	var stdout, stderr bytes.Buffer
	cmd.Stdout, cmd.Stderr = &stdout, &stderr
	if err := cmd.Run(); err != nil {
		return "", fmt.Errorf("%w: %s%s", err, &stdout, &stderr)
	}
	digest, _, _ = strings.Cut(stdout.String(), " ")
	return digest, nil
}

func (r *largeRun) importRef(name, ref string, flags ...string) (digest string) {
	r.Helper()
	digest, err := r.tryImport(name, ref, flags...)
	if err != nil {
		r.Fatal(err)
	}
	if m := r.memory(); m > importMemory {
		r.Errorf("the server took %d MiB during an import", m>>20)
	}
	return digest
}

// memory is the most that the server's process has taken.
func (r *largeRun) memory() int64 {
	b, _ := os.ReadFile(fmt.Sprintf("/proc/%d/status", r.node.cmd.Process.Pid))
	_, line, _ := strings.Cut(string(b), "VmHWM:")
	var kib int64
	_, _ = fmt.Sscan(line, &kib)
	return kib << 10
}

func (r *largeRun) movesNothing() {
	r.Helper()
	if _, n := r.registry.counts(); n != 0 {
		r.Errorf("%d blobs were asked for that are there", n)
	}
}

// have is what of blobs lies on the node, whole and in part.
func (r *largeRun) have() int64 {
	r.Helper()
	var sum int64
	entries, err := os.ReadDir(filepath.Join(r.node.dir, "cache", "blobs"))
	if err != nil && !errors.Is(err, fs.ErrNotExist) {
		r.Fatal(err)
	}
	for _, e := range entries {
		if info, err := e.Info(); err == nil {
			sum += info.Size()
		}
	}
	return sum
}

func sizeOf(t *testing.T, img v1.Image) int64 {
	t.Helper()
	m, err := img.Manifest()
	if err != nil {
		t.Fatal(err)
	}
	sum := m.Config.Size
	for _, l := range m.Layers {
		sum += l.Size
	}
	return sum
}

// interrupted imports while the registry is killed, the server is killed fetching, and the server is killed writing. Nothing is fetched twice.
func (r *largeRun) interrupted(ref string, img v1.Image) (digest string) {
	total := sizeOf(r.T, img)
	r.registry.after(total/3, r.registry.kill)
	if _, err := r.tryImport("image:1", ref); err == nil || !strings.Contains(err.Error(), "cannot be reached") {
		r.Fatalf("without its registry: %v", err)
	}
	r.registry.start()
	if n := r.have(); n < total/3-1<<20 || n >= total {
		r.Errorf("%d bytes of %d are kept of a transfer that ended after %d", n, total, total/3)
	}

	have := r.have()
	r.registry.after(total/3, r.node.kill)
	if _, err := r.tryImport("image:1", ref); err == nil {
		r.Fatal("the server was killed and the import went on")
	}
	r.asked("after the registry's death", total-have)
	r.restart()

	have = r.have()
	r.registry.after(0, nil)
	writing := make(chan struct{})
	go func() {
		defer close(writing)
		for end := time.Now().Add(5 * time.Minute); time.Now().Before(end); time.Sleep(time.Millisecond) {
			if stagedBytes(r.node.dir) > 1<<20 {
				break
			}
		}
		r.node.kill()
	}()
	_, err := r.tryImport("image:1", ref)
	<-writing
	if err == nil {
		r.Log("the import was done before the server was killed")
	}
	r.asked("after the server's death", total-have)
	r.restart()
	if n := stagedBytes(r.node.dir); n != 0 {
		r.Errorf("%d bytes of an import that ended are left", n)
	}

	r.registry.after(0, nil)
	digest = r.importRef("image:1", ref)
	r.movesNothing()
	return digest
}

func (r *largeRun) asked(when string, most int64) {
	r.Helper()
	if n, _ := r.registry.counts(); n > most {
		r.Errorf("%s: %d bytes were asked for, %d were missing", when, n, most)
	}
}

func (r *largeRun) restart() {
	r.Helper()
	if err := r.node.start(); err != nil {
		r.Fatal(err)
	}
}

// stagedBytes is what imports that are under way have on the disk.
func stagedBytes(dir string) int64 {
	var sum int64
	_ = filepath.WalkDir(filepath.Join(dir, "layers", "tmp"), func(_ string, d fs.DirEntry, err error) error {
		if err != nil || d.IsDir() {
			return nil //nolint:nilerr // what is gone has no size
		}
		if info, err := d.Info(); err == nil {
			sum += info.Sys().(*syscall.Stat_t).Blocks * 512
		}
		return nil
	})
	return sum
}

// want is the tree as it was unpacked.
func (r *largeRun) want() func(skip []string) *treeList {
	var buf bytes.Buffer
	r.step("list the tree", func() {
		if err := listTree(r.image.tree, nil, &buf); err != nil {
			r.Fatal(err)
		}
	})
	all := parseTreeList(r.T, &buf)
	return func(skip []string) *treeList {
		out := &treeList{names: map[string]listed{}}
		for path, e := range all.names {
			name := unquoted(path)
			if !slices.ContainsFunc(skip, func(s string) bool { return name == s || strings.HasPrefix(name, s+"/") }) {
				out.names[path] = e
			}
		}
		return out
	}
}

// compare lists what a sandbox of an image sees.
func (r *largeRun) compare(image string, want func(skip []string) *treeList, links bool) {
	id := r.node.must(r.T, "create", "--image", image, "--memory", "1GiB")
	defer r.node.must(r.T, "stop", id)
	r.node.must(r.T, "exec", id, "--", "sh", "-c", treeListRoot+"=/ /srv/large/list > /dev/shm/listed")
	listedPath := filepath.Join(r.dir, "listed")
	r.node.must(r.T, "cp", id+":/dev/shm/listed", listedPath)
	f, err := os.Open(listedPath)
	if err != nil {
		r.Fatal(err)
	}
	defer f.Close()
	got := parseTreeList(r.T, f)
	// What a sandbox has of its own: these files, and the times of the directories that they are put into.
	own := []string{"etc/hostname", "etc/hosts", "etc/resolv.conf", "etc/machine-id"}
	wanted := want(append(got.skipped, own...))
	for _, name := range own {
		delete(got.names, strconv.Quote(name))
	}
	for _, dir := range []string{`""`, `"etc"`} {
		if e, ok := got.names[dir]; ok {
			e.Sec, e.Nsec = wanted.names[dir].Sec, wanted.names[dir].Nsec
			got.names[dir] = e
		}
	}
	r.Logf("%s: %d names; left out %v", image, len(got.names), got.skipped)
	if !links {
		got, wanted = got.withoutLinks(), wanted.withoutLinks()
	}
	if d := got.differences(wanted); len(d) > 0 {
		r.Errorf("a sandbox of %s differs from the tree:\n%s", image, strings.Join(d, "\n"))
	}
	if got := r.node.must(r.T, "exec", id, "--", "sh", "-c", `echo "$FROM_IMAGE $PWD"`); got != "yes /srv" {
		r.Errorf("the config of %s gives %q", image, got)
	}
}

// use runs what the large image is made for.
func (r *largeRun) use() {
	if !r.large {
		return
	}
	id := r.node.must(r.T, "create", "--image", "image:1", "--memory", "4GiB")
	defer r.node.must(r.T, "stop", id)
	for _, c := range []string{
		`cd /tmp; echo 'int main(){return 0;}' > a.c; gcc a.c -o a; ./a; clang a.c -o b; ./b; cp a.c a.cc; g++ a.cc -o c; ./c`,
		`cd /tmp; echo 'class A { public static void main(String[] a) { System.out.print(6 * 7); } }' > A.java; javac A.java; test $(java A) = 42`,
		`python3 -c 'import numpy, scipy.linalg, pandas, sklearn, matplotlib; print(numpy.linalg.det(numpy.eye(3)))'`,
		`cd /tmp; echo 'fn main() {}' > a.rs; rustc a.rs -o rs; ./rs`,
	} {
		if got := r.node.cli(r.T, "exec", id, "--", "sh", "-ec", c); got.code != 0 {
			r.Errorf("%s: exit %d: %s%s", c, got.code, got.stdout, got.stderr)
		}
	}
}

// changed gives the image a layer more, above the lowest one, and imports it by the name of the one before.
func (r *largeRun) changed(before v1.Image) {
	m := r.image
	noise := int64(3 << 20)
	m.sh(`mkdir -p opt/new; head -c "$1" /dev/urandom > opt/new/noise; cp etc/passwd opt/new/small; cp srv/kept/noise opt/new/copy; touch -d 2022-02-02 opt/new opt .`, fmt.Sprint(noise))
	extra := m.layer(packed{compression: "zstd", paths: []string{"opt/new"}})
	m.layers = slices.Insert(m.layers, 1, extra)
	// The layers above have the root directory's older time, and win.
	m.sh(`touch -d 2023-03-03 .`)
	m.pack(packed{compression: "gzip", dirs: []string{"."}, paths: []string{"opt/new/small"}})
	img := m.image(m.layers...)
	ref := r.push("team/large:2", img)
	r.registry.after(0, nil)
	// merged:1 is what merged:2 is written against: --against names it, as the tag is another one.
	r.importRef("merged:2", ref, "--collapse", "60GB", "--against", "merged:1")
	m2, err := img.Manifest()
	if err != nil {
		r.Fatal(err)
	}
	fresh := extra.blob.Size + m.layers[len(m.layers)-1].blob.Size + m2.Config.Size
	if n, _ := r.registry.counts(); n != fresh {
		r.Errorf("%d bytes were asked for, the new layers have %d", n, fresh)
	}
	one, two := r.show("merged:1"), r.show("merged:2")
	r.Logf("before %+v, after %+v", one, two)
	// The copy of a file, a small one and all the rest are there; blocks count whole.
	if two.Unique < noise || two.Unique > noise+64<<10 {
		r.Errorf("the new version has %d bytes of its own; %d are new", two.Unique, noise)
	}
	if shared := one.Unique + one.Shared; two.Shared < shared*9/10 || two.Shared > shared+1<<20 {
		r.Errorf("the new version shares %d bytes of %d", two.Shared, shared)
	}
	for _, name := range []string{"image:1", "merged:1", "merged:2"} {
		if got := r.node.must(r.T, "layer", "verify", name); !strings.Contains(got, "intact") {
			r.Errorf("verify %s: %s", name, got)
		}
	}
	want := r.want()
	r.compare("merged:2", want, true)

	// A tree of some of the same and something new, against the image and against nothing.
	part := filepath.Join(r.dir, "part")
	m.sh(`mkdir "$1"; cp opt/new/noise "$1"/large; cp srv/kept/noise "$1"/small; head -c 100000 /dev/urandom > "$1"/new`, part)
	r.node.must(r.T, "layer", "import", "--name", "part:against", "--kind", "toolkit", "--against", "merged:2", "dir:"+part)
	r.node.must(r.T, "layer", "import", "--name", "part:none", "--kind", "toolkit", "--against", "none", "dir:"+part)
	against, none := r.show("part:against"), r.show("part:none")
	// The small file is copied: less than a quarter of the blob in which it lies is of use (docs/layers.md).
	if against.Unique < 400000 || against.Unique > 420000 || against.Shared != noise {
		r.Errorf("against the image it is written %+v", against)
	}
	if none.Shared != 0 || none.Unique < noise+400000 {
		r.Errorf("against nothing it is written %+v", none)
	}
	r.node.must(r.T, "layer", "verify", "part:against")
}

type usage struct {
	Logical int64 `json:"logical_bytes,string"`
	Unique  int64 `json:"unique_bytes,string"`
	Shared  int64 `json:"shared_bytes,string"`
}

func (r *largeRun) show(name string) usage {
	r.Helper()
	var u usage
	out := r.node.must(r.T, "layer", "show", "--json", name)
	if err := json.Unmarshal([]byte(out), &u); err != nil {
		r.Fatalf("%v: %s", err, out)
	}
	return u
}
