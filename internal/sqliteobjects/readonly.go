package sqliteobjects

import (
	"context"
	"database/sql"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"time"

	"github.com/tenurelib/tenure/internal/objects"
)

// OpenToRead opens the file at path for a user who may only read it, and creates nothing.
//
// To read a file in WAL mode, SQLite needs the files of the log beside it. They vanish when the
// last process closes the file, and such a user can't create them. Then the file alone is the
// whole database, and is read without a lock. After all reads, stands reports whether that is still
// the case. If not, the result may be torn, and the file must be opened and read again.
func OpenToRead(ctx context.Context, path string) (db *sql.DB, stands func() bool, err error) {
	path, err = located(path) // the log is beside the file itself
	var before fileState
	if err == nil {
		before, err = stateOf(path)
	}
	if err != nil {
		return nil, nil, fmt.Errorf("%w: %w", objects.ErrSetup, err)
	}
	query := fmt.Sprintf("mode=ro&_pragma=busy_timeout(%d)", busyTimeout.Milliseconds())
	stands = func() bool { return true }
	if before.alone {
		query += "&immutable=1"
		stands = func() bool {
			now, err := stateOf(path)
			return err == nil && now.alone && now.size == before.size && now.written.Equal(before.written) && os.SameFile(now.file, before.file)
		}
	}
	db, err = sql.Open(driverName, fileURL(path)+"?"+query)
	if err != nil {
		return nil, nil, err
	}
	if err := whenFree(ctx, func() error { return db.PingContext(ctx) }); err != nil {
		db.Close()
		if before.logged {
			err = fmt.Errorf("%w (a program that has crashed has left a log beside the file, which a user who may write to the directory has to open once)", err)
		}
		return nil, nil, explainOpen(err)
	}
	return db, stands, nil
}

// fileState shows whether a file has changed, and how to read it.
type fileState struct {
	file    fs.FileInfo
	size    int64
	written time.Time
	logged  bool // there is a log beside it
	alone   bool // there is neither a log nor a journal
}

// stateOf returns the state of a file without opening it, because closing the file would drop the
// process's locks on it.
func stateOf(path string) (fileState, error) {
	info, err := os.Stat(path)
	if err != nil {
		return fileState{}, err
	}
	missing := func(suffix string) bool {
		_, err := os.Stat(path + suffix)
		return errors.Is(err, fs.ErrNotExist)
	}
	logged := !missing("-wal")
	return fileState{file: info, size: info.Size(), written: info.ModTime(), logged: logged, alone: !logged && missing("-journal")}, nil
}
