package layer

import (
	"bytes"
	"context"
	"fmt"
	"math/rand"
	"os"
	"testing"
)

// TestMain runs this program as the victim of the crash test when asked to.
func TestMain(m *testing.M) {
	if dir := os.Getenv("HARENA_TEST_IMPORT_FOREVER"); dir != "" {
		importForever(dir)
	}
	os.Exit(m.Run())
}

// importForever imports, removes and collects until it is killed.
func importForever(dir string) {
	s, err := Open(dir, Limits{})
	if err != nil {
		fmt.Println("open:", err)
		os.Exit(1)
	}
	t := &fakeT{}
	for i := 0; ; i++ {
		content := make([]byte, 300_000)
		rand.New(rand.NewSource(int64(i % 7))).Read(content)
		in := bytes.NewReader(tarOf(t, entry{"a", string(content), 0}, entry{"b", fmt.Sprint(i), 0}))
		_, err := s.ImportTar(context.Background(), in, ImportOptions{Name: fmt.Sprintf("n%d", i%5), Kind: Base, Source: "tar"})
		if err == nil && i == 0 {
			fmt.Println("ready") // so that every kill comes after a whole import, however slow the machine
		}
		if err == nil && i%3 == 2 {
			_, err = s.Remove(context.Background(), "", fmt.Sprintf("n%d", i%5))
		}
		if err == nil && i%10 == 9 {
			_, err = s.CollectGarbage(context.Background(), GCOptions{})
		}
		if err != nil {
			fmt.Println("failed:", err)
			os.Exit(1)
		}
	}
}

// fakeT is a testing.TB outside of a test.
type fakeT struct{ testing.TB }

func (*fakeT) Helper()           {}
func (*fakeT) Fatal(args ...any) { panic(fmt.Sprint(args...)) }
