//go:build linux || darwin || freebsd || netbsd || openbsd || dragonfly

package kit

import (
	"fmt"
	"os"
	"path/filepath"
	"sync"
	"syscall"
	"time"
)

// turnsVar names a directory. Each of its files is a turn to run servers, for one package at a time. So make check runs
// more packages at once than the machine could run servers for: those that wait for their turn cost nothing.
const turnsVar = "TENURE_TEST_TURNS"

var turn struct {
	once sync.Once
	lock *os.File // held until the process ends
	err  error
}

// awaitTurn returns when this process may start servers.
func awaitTurn() error {
	turn.once.Do(func() {
		dir := os.Getenv(turnsVar)
		if dir == "" {
			return
		}
		turn.lock, turn.err = takeTurn(dir)
		os.Unsetenv(turnsVar) // the processes that this one starts share its turn
	})
	return turn.err
}

func takeTurn(dir string) (*os.File, error) {
	for ; ; time.Sleep(100 * time.Millisecond) {
		files, err := filepath.Glob(filepath.Join(dir, "*"))
		if err != nil || len(files) == 0 {
			return nil, fmt.Errorf("kit: %s: there are no turns in %q: %v", turnsVar, dir, err)
		}
		for _, file := range files {
			lock, err := os.Open(file)
			if err != nil {
				return nil, fmt.Errorf("kit: %s: %w", turnsVar, err)
			}
			if syscall.Flock(int(lock.Fd()), syscall.LOCK_EX|syscall.LOCK_NB) == nil {
				return lock, nil
			}
			lock.Close()
		}
	}
}
