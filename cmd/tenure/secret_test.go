//go:build unix

package main

import (
	"bytes"
	"context"
	"fmt"
	"os"
	"strings"
	"sync"
	"testing"

	"github.com/tenurelib/tenure/internal/pgconns"
	"github.com/tenurelib/tenure/proof/kit"
)

// The servers' addresses refuse connections at once, and the context has ended.
func TestNoCommandShowsThePasswordOfAMistypedURL(t *testing.T) {
	t.Chdir(t.TempDir())
	t.Setenv(storeEnv, "")
	ctx, cancel := context.WithCancel(t.Context())
	cancel()
	var all sync.WaitGroup
	most := make(chan struct{}, 32) // some wait a little before they give up
	for url := range kit.MistypedURLs() {
		most <- struct{}{}
		all.Go(func() {
			defer func() { <-most }()
			for _, args := range [][]string{
				{"status", "-key", "k", "-store", url}, {"status", url}, {"list", url}, {url}, {"help", url},
				{"status", "-" + url}, {"status", "-wait=" + url}, {"list", "-json=" + url}, {"owner", "-ttl", url}, {"handover", "-wait", url},
			} {
				var out bytes.Buffer
				if run(ctx, args, &out, &out); kit.ShowsPassword(out.String()) {
					t.Errorf("%q: %s", args, &out)
				}
			}
		})
	}
	all.Wait()
	if files, err := os.ReadDir("."); err != nil || len(files) > 0 {
		t.Errorf("a URL was taken for the path of a file: %v, %v", files, err)
	}
}

func TestAnErrorNamesAnArgumentThatIsNoURL(t *testing.T) {
	for arg, want := range map[string]string{"status": `"status"`, "a.db": `"a.db"`, "a/b@c": "(not shown)"} {
		if status, _, stderr := tenureCommand(t, "version", arg); status != 2 || !strings.Contains(stderr, fmt.Sprintf("unexpected argument %s", want)) {
			t.Errorf("%s: exit status %d: %s", arg, status, stderr)
		}
	}
}

// No error of tenure's own has a URL; this one is of a library that quotes what it was given.
func TestAURLInAnErrorIsHidden(t *testing.T) {
	for _, scheme := range []string{"postgres", "postgresql", "nats", "tls", "etcd", "etcds", "kube"} {
		var out bytes.Buffer
		fmt.Fprintf(concealer{&out}, "dial %q: refused", scheme+"://app:s3cret@h/db")
		if want := fmt.Sprintf("dial %q: refused", scheme+"://(not shown)"); out.String() != want {
			t.Errorf("got %s, want %s", &out, want)
		}
	}
}

func TestTheFormOfAURLThatAnErrorWantsIsShown(t *testing.T) {
	var out strings.Builder
	fmt.Fprint(concealer{&out}, "not postgres://app:s3cret@h; want "+pgconns.URLForm+", or postgres://app:s3cret@h")
	if want := "not postgres://(not shown)" + pgconns.URLForm + ", or postgres://(not shown)"; out.String() != want {
		t.Errorf("got %q, want %q", out.String(), want)
	}
}
