package sqliteobjects

import (
	"database/sql"
	"errors"
	"log/slog"
	"path/filepath"
	"testing"
	"testing/synctest"
	"time"

	"github.com/stretchr/testify/require"
	_ "modernc.org/sqlite"

	"github.com/tenurelib/tenure/internal/filewatch"
	"github.com/tenurelib/tenure/internal/objects"
)

// file is a database's file in virtual time that is looked at.
type file struct {
	looks  looks
	told   chan struct{} // carries notifications
	opened int
	read   int // objects that a look reads
	found  bool
}

func newFile() *file {
	f := &file{told: make(chan struct{}, 1)}
	f.looks = looks{logger: slog.New(slog.DiscardHandler), watch: func() (*filewatch.Watcher, error) {
		f.opened++
		return &filewatch.Watcher{C: f.told}, nil
	}}
	f.looks.open()
	return f
}

// look looks once, and waits until it is time for the next look.
func (f *file) look(t *testing.T) {
	rest := f.looks.after(f.found, f.read)
	f.found = false
	require.True(t, f.looks.await(t.Context(), rest))
}

// until looks for that long, and returns how often it looked.
func (f *file) until(t *testing.T, d time.Duration) (n int) {
	for end := time.Now().Add(d); time.Now().Before(end); n++ {
		f.look(t)
	}
	return n
}

// announce makes the file's next change one that a notification has announced.
func (f *file) announce(t *testing.T) {
	f.told <- struct{}{}
	f.look(t)
	f.found = true
	f.look(t)
}

func TestAFileThatIsWatchedIsLookedAtOnceASecond(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFile()
		f.until(t, quietInterval)
		require.InDelta(t, 60, f.until(t, time.Minute), 2, "before any notification")
		f.announce(t)
		f.until(t, quietInterval)
		require.InDelta(t, 60, f.until(t, time.Minute), 2, "after a change that was announced")
	})
}

func TestAfterAChangeThatWasNotAnnouncedTheFileIsWatchedAnew(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFile()
		f.announce(t)
		f.until(t, 2*quietInterval)
		require.Equal(t, 1, f.opened)
		f.found = true
		f.look(t)
		require.Equal(t, 2, f.opened)
	})
}

func TestAFileThatCannotBeWatchedIsPolled(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFile()
		f.announce(t)
		f.looks.watch = func() (*filewatch.Watcher, error) { return nil, errors.New("no space left on device") }
		f.until(t, 2*quietInterval)
		f.found = true
		require.InDelta(t, 1200, f.until(t, time.Minute), 2)
	})
}

// The commit is visible only after its notification, and is found before twice that time has passed.
func TestACommitIsFoundSoonAfterItsNotificationHoweverLongTheDiskTakes(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFile()
		for _, second := range []bool{false, true} { // while the looks of a commit before it are still under way
			for disk := 100 * time.Microsecond; disk < quietInterval/2; disk *= 2 {
				f.announce(t)
				if !second {
					f.until(t, 2*quietInterval)
				}
				began := time.Now()
				f.told <- struct{}{}
				for n := 0; time.Since(began) < disk; n++ {
					f.look(t)
				}
				require.LessOrEqual(t, time.Since(began), 2*disk+shortestRest, "visible after %v, second %v", disk, second)
				f.until(t, 2*quietInterval)
			}
		}
	})
}

func TestAFileThatIsWrittenAllTheTimeIsLookedAtWithRests(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		for read, perSecond := range map[int]int{0: 1000, 1: 1000, 4: 250, 1000: 20} {
			f := newFile()
			f.read = read
			n, end := 0, time.Now().Add(time.Minute)
			for ; time.Now().Before(end); n++ {
				select {
				case f.told <- struct{}{}:
				default:
				}
				f.found = true
				f.look(t)
			}
			require.InDelta(t, 60*perSecond, n, 2, "%d objects", read)
		}
	})
}

// The next commit's notification may come before the look that finds the last commit, so that nothing else announces
// it.
func TestAfterACommitTheLooksGoOn(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		f := newFile()
		f.announce(t)
		f.until(t, 2*quietInterval)
		f.announce(t)
		require.GreaterOrEqual(t, f.until(t, 10*time.Millisecond), 3)
	})
}

func TestTheLogOfASQLiteFileIsWatched(t *testing.T) {
	path := filepath.Join(t.TempDir(), "data.db")
	db, err := openDB(t.Context(), path)
	require.NoError(t, err)
	defer db.Close()
	table := New(db, "objects", slog.New(slog.DiscardHandler))
	require.NoError(t, table.Migrate(t.Context()))
	conn, found, err := table.watches.pollConn(t.Context())
	require.NoError(t, err)
	defer conn.Close()

	l := newLooks(found, slog.New(slog.DiscardHandler))
	defer l.close()
	version := func() (v int64) {
		require.NoError(t, conn.QueryRowContext(t.Context(), `PRAGMA data_version`).Scan(&v))
		return v
	}
	last := version()
	if l.open(); l.watcher == nil {
		t.Skip("this system has no notifications that the library uses")
	}
	other, err := sql.Open("sqlite", path)
	require.NoError(t, err)
	defer other.Close()
	for inARow, deadline := 0, time.Now().Add(time.Minute); inARow < 3; { // on a busy machine, one may come after the look of each second
		require.True(t, time.Now().Before(deadline), "changes are not announced")
		l.told = time.Time{} // what was announced before does not count
		_, err := other.Exec(`REPLACE INTO objects_tombstones VALUES ('t', '1', 1)`)
		require.NoError(t, err)
		v := last
		for v == last {
			require.True(t, l.await(t.Context(), l.after(false, 0)))
			v = version()
		}
		last = v
		if inARow++; !l.announced() {
			inARow = 0
		}
		l.after(true, 0)
	}
}

// A watch for hints about another table is the watch of a missing object, and any commit may concern it: a file that is
// written all the time wakes such watches no more often than polling did.
func TestHintsThatMayBeAboutAnythingAreFewWhileTheFileIsWritten(t *testing.T) {
	db, err := openDB(t.Context(), filepath.Join(t.TempDir(), "data.db"))
	require.NoError(t, err)
	defer db.Close()
	table := New(db, "objects", slog.New(slog.DiscardHandler))
	defer table.Close()
	require.NoError(t, table.Migrate(t.Context()))
	watch := table.Watch(objects.ID{Type: "queue", ID: "1"})
	defer watch.Stop()
	n, began := 0, time.Now()
	for time.Since(began) < time.Second {
		_, err := db.Exec(`REPLACE INTO objects_tombstones VALUES ('t', '1', 1)`)
		require.NoError(t, err)
		select {
		case <-watch.C():
			n++
		default:
		}
	}
	require.Greater(t, n, 1)
	require.LessOrEqual(t, n, 10+int(time.Since(began)/pollInterval))
}
