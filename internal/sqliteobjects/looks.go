package sqliteobjects

import (
	"context"
	"log/slog"
	"time"

	"github.com/tenurelib/tenure/internal/filewatch"
	"github.com/tenurelib/tenure/internal/pace"
)

const (
	pollInterval  = 50 * time.Millisecond // the longest time between looks, where there are no notifications
	quietInterval = time.Second           // the same where there are
	shortestRest  = time.Millisecond
)

// looks decides when to look at a database for changes by other connections: after a notification that its write-ahead log was
// written, and from time to time.
//
// A notification comes before the commit is visible, because SQLite then waits for the disk, and another commit may begin before
// the look. A notification therefore begins a series of looks, in which each pause is twice as long as the last.
//
// Where the log cannot be watched, there are no notifications: on systems other than Linux, at a limit of inotify, and for a
// database without a log. A file system that accepts the watch and reports nothing costs a wake-up a second. After a change that was not announced, the log is watched anew, because it may be another file.
type looks struct {
	watch  func() (*filewatch.Watcher, error) // watches the log
	logger *slog.Logger

	watcher *filewatch.Watcher // nil: none is available
	logged  bool               // that none is available
	told    time.Time          // when the last notification came
	pause   time.Duration      // before the last look of a series
}

// newLooks returns the looks at a database's file, which the caller must open and close.
func newLooks(file string, logger *slog.Logger) *looks {
	return &looks{watch: func() (*filewatch.Watcher, error) { return filewatch.New(file + "-wal") }, logger: logger}
}

// open watches the log, which exists while a connection uses it.
func (l *looks) open() {
	l.close()
	watcher, err := l.watch()
	if err == nil {
		l.watcher = watcher
	} else if !l.logged {
		l.logged = true
		l.logger.Debug("the database's file is polled", "interval", pollInterval, "error", err)
	}
}

func (l *looks) close() {
	if l.watcher != nil {
		l.watcher.Close()
		l.watcher = nil
	}
}

// announced reports whether a change has been announced that may not be visible yet.
func (l *looks) announced() bool { return time.Since(l.told) < quietInterval }

// after notes whether the last look has found a change, and how many objects it has read. It returns how long to rest, so that
// looks take at most a few percent of one processor's time, however often the file is written.
func (l *looks) after(changed bool, read int) (rest time.Duration) {
	if changed {
		if !l.announced() {
			l.open()
		}
		l.pause = 0
	}
	rest = min(shortestRest*time.Duration(max(read, 1)), pollInterval)
	l.pause = min(max(2*l.pause, rest), quietInterval)
	return rest
}

// await rests, and waits until it is time for the next look. It returns false once ctx is done.
func (l *looks) await(ctx context.Context, rest time.Duration) bool {
	if !pace.Sleep(ctx, rest) { // without receiving: writes that come meanwhile cost nothing
		return false
	}
	longest, told := pollInterval, (<-chan struct{})(nil)
	if l.watcher != nil {
		longest, told = quietInterval, l.watcher.C
	}
	if l.announced() {
		longest = min(longest, l.pause)
	}
	woken, ok := pace.Await(ctx, told, 0, longest-rest)
	if woken {
		l.told, l.pause = time.Now(), 0
	}
	return ok
}
