package scenario

import (
	"encoding/json"
	"fmt"
	"os"
	"path/filepath"
	"strings"
	"testing"
	"time"
)

// buildScript makes a project of so many C files, compiles it, installs it as a package, and has it tested.
const buildScript = `set -e
files=$1
mkdir -p /srv/p/src && cd /srv/p
i=0
while [ $i -lt $files ]; do
	{
		echo '#include <stdint.h>'
		j=0
		while [ $j -lt 40 ]; do
			echo "uint64_t f${i}_$j(uint64_t x) { for (int k = 0; k < 64; k++) x = (x ^ $i) * 0x9e3779b97f4a7c15u + (x >> 29) + $j * k; return x; }"
			j=$((j+1))
		done
		echo "uint64_t f$i(uint64_t x) {"; j=0
		while [ $j -lt 40 ]; do echo "x = f${i}_$j(x);"; j=$((j+1)); done
		echo 'return x; }'
	} > src/f$i.c
	i=$((i+1))
done
{ echo '#include <stdint.h>'; echo '#include <stdio.h>'
i=0; while [ $i -lt $files ]; do echo "uint64_t f$i(uint64_t);"; i=$((i+1)); done
echo 'int main(void) { uint64_t x = 1;'
i=0; while [ $i -lt $files ]; do echo "x = f$i(x);"; i=$((i+1)); done
cat <<'EOF'
printf("%016llx\n", (unsigned long long)x); return 0; }
EOF
} > src/main.c
cat > Makefile <<'EOF'
OBJS := $(patsubst %.c,%.o,$(wildcard src/*.c))
prog: $(OBJS)
	$(CC) -o $@ $^
%.o: %.c
	$(CC) -O2 -c -o $@ $<
	@echo compiled >> compiled
test: prog
	./prog > got && cmp got want && echo passed
EOF
make -s -j2 prog && ./prog > want && make -s test
mkdir -p pkg/DEBIAN pkg/opt/prog && cp prog pkg/opt/prog/
printf 'Package: prog\nVersion: 1\nArchitecture: amd64\nMaintainer: nobody <nobody@localhost>\nDescription: built here\n' > pkg/DEBIAN/control
dpkg-deb --build pkg prog.deb > /dev/null && dpkg -i prog.deb > /dev/null
du -sb /srv/p /opt | awk '{ n += $1 } END { print n }'
`

// What took long to build in a sandbox is built on another node: the same tests pass, nothing is compiled again, about what was changed was
// stored, and what was edited since is stored in kilobytes.
func TestBuildIsRestoredElsewhere(t *testing.T) {
	if _, err := os.Stat(program("harena")); err != nil || os.Geteuid() != 0 {
		t.Skip("it starts nodes of its own: root and bin/harena are needed")
	}
	files := count(0, 200)
	if files == 0 {
		t.Skip("it makes a base layer with a compiler: HARENA_SOAK says whether")
	}
	root, err := os.MkdirTemp("/var/tmp", "harena-build-")
	if err != nil {
		t.Fatal(err)
	}
	t.Cleanup(func() { _ = os.RemoveAll(root) })
	store := filepath.Join(root, "store")
	if err := os.Mkdir(store, 0o700); err != nil {
		t.Fatal(err)
	}
	a := startStoreNode(t, filepath.Join(root, "a"), "file://"+store)
	b := startStoreNode(t, filepath.Join(root, "b"), "file://"+store)
	a.takes(20*time.Minute, "layer", "import", "--name", "cc:1", "debootstrap:bookworm:gcc,libc6-dev,make")

	id := strings.TrimSpace(a.run("create", "--image", "cc:1"))
	var changed int64
	out := strings.Fields(a.takes(20*time.Minute, "exec", id, "--", "sh", "-c", buildScript, "sh", fmt.Sprint(files)))
	if len(out) != 2 || out[0] != "passed" {
		t.Fatalf("build: %q", out)
	}
	if _, err := fmt.Sscan(out[1], &changed); err != nil {
		t.Fatal(err)
	}
	take := func(name string) int64 {
		t.Helper()
		var s struct {
			StoredBytes int64 `json:"stored_bytes"`
		}
		if err := json.Unmarshal([]byte(a.run("snapshot", id, "--name", name, "--json")), &s); err != nil {
			t.Fatal(err)
		}
		return s.StoredBytes
	}
	stored := take("built:1")
	if stored > changed+changed/4+2<<20 { // dpkg rewrites its lists; what is there twice is stored once
		t.Errorf("%d bytes are stored of about %d that were written", stored, changed)
	}
	a.run("exec", id, "--", "sh", "-c", `sleep 1; echo '/* a line */' >> /srv/p/src/f1.c`)
	edit := take("built:2")
	if edit > 64<<10 {
		t.Errorf("%d bytes are stored after a line was added", edit)
	}
	t.Logf("%d files: %d bytes written, %d stored; after a line %d", files, changed, stored, edit)
	want := a.run("exec", id, "--", "cat", "/srv/p/want")
	a.run("stop", id)

	for name, compiled := range map[string]string{"built:1": "0", "built:2": "1"} {
		c := strings.TrimSpace(b.run("create", "--image", name))
		got := b.takes(10*time.Minute, "exec", c, "--", "sh", "-c", `cd /srv/p && : > compiled && make -s test && wc -l < compiled && /opt/prog/prog && dpkg -s prog | grep -c '^Status: install ok installed'`)
		if got != "passed\n"+compiled+"\n"+want+"1\n" {
			t.Errorf("%s elsewhere: %q, want %s compiled and %q", name, got, compiled, want)
		}
		b.run("stop", c)
	}
}
