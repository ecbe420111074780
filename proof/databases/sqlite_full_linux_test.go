package databases_test

import (
	"context"
	"errors"
	"fmt"
	"math/rand/v2"
	"os"
	"path/filepath"
	"sync"
	"sync/atomic"
	"syscall"
	"testing"
	"time"

	"github.com/tenurelib/tenure"
	"github.com/tenurelib/tenure/internal/testkit"
)

// A small disk fills up and has room again while calls end at any moment of a write.
func TestWhatSQLiteReportsAsWrittenIsThereThoughTheDiskFillsUpAndCallsEnd(t *testing.T) {
	testkit.Slow(t)
	const workers, long, longest = 4, 2 * time.Second, time.Minute
	dir := t.TempDir()
	if err := syscall.Mount("tmpfs", dir, "tmpfs", 0, "size=8m"); err != nil {
		t.Skipf("a small file system can't be mounted: %v", err)
	}
	t.Cleanup(func() {
		if err := syscall.Unmount(dir, syscall.MNT_DETACH); err != nil {
			t.Error(err)
		}
	})
	path := filepath.Join(dir, "t.db")
	testkit.Migrate(t, testkit.OpenSQLite(t, path))
	began := time.Now()
	var written, full, ended atomic.Int64
	enough := func() bool {
		took := time.Since(began)
		return took > longest || took > long && written.Load() >= 100 && full.Load() >= 100 && ended.Load() >= 100
	}
	var wg sync.WaitGroup
	for i := range workers {
		store, reader := testkit.OpenSQLite(t, path), testkit.OpenSQLite(t, path)
		obj := testkit.Put(t, store, tenure.Object{Key: tenure.Key{Type: "t", ID: fmt.Sprint(i)}})
		wg.Go(func() {
			for typical := time.Millisecond; !enough(); {
				ctx, cancel := context.WithTimeout(t.Context(), rand.N(2*typical))
				sent := time.Now()
				next, err := store.PutIf(ctx, obj, tenure.IfVersion(obj.Version))
				took := time.Since(sent)
				cancel()
				now, readErr := reader.Get(t.Context(), obj.Key)
				switch {
				case readErr != nil:
					t.Error(readErr)
					return
				case err == nil && now.Version != next.Version:
					t.Errorf("version %d was reported as written, and %d is there", next.Version, now.Version)
					return
				case err == nil:
					written.Add(1)
				case errors.Is(err, context.DeadlineExceeded):
					ended.Add(1)
					took += took / 4 // it would have taken longer
				default:
					full.Add(1)
				}
				typical = (15*typical + took) / 16 // so that deadlines fall into writes
				obj = now
			}
		})
	}
	filler := filepath.Join(dir, "filler")
	for some := make([]byte, 4096); !enough(); {
		file, err := os.Create(filler)
		testkit.WantErr(t, err, nil)
		for err == nil {
			_, err = file.Write(some)
		}
		if !errors.Is(err, syscall.ENOSPC) {
			t.Errorf("the disk is not full: %v", err)
		}
		for target := full.Load() + 10; full.Load() < target && !enough(); {
			time.Sleep(time.Millisecond) // it stays full for some calls
		}
		file.Close()
		testkit.WantErr(t, os.Remove(filler), nil)
		for target := written.Load() + 10; written.Load() < target && !enough(); {
			time.Sleep(time.Millisecond)
		}
	}
	wg.Wait()
	t.Logf("%d written, %d failed, %d ended", written.Load(), full.Load(), ended.Load())
	if time.Since(began) > longest {
		t.Error("too little happened to tell anything")
	}
}
