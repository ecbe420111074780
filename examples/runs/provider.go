package main

import (
	"fmt"
	"net/url"
	"os"
	"path/filepath"
)

// provider stands for another system, which charges and ships: a directory with a file for each
// call. A call that is made twice with the same key has one effect, and a line for each time.
type provider struct{ dir string }

func (p provider) path(key string) string { return filepath.Join(p.dir, url.PathEscape(key)) }

func (p provider) call(key string) (outcome string, err error) {
	file, err := os.OpenFile(p.path(key), os.O_CREATE|os.O_APPEND|os.O_WRONLY, 0o600)
	if err != nil {
		return "", err
	}
	defer file.Close()
	_, err = fmt.Fprintln(file, "called")
	return key + " is done", err
}

// find returns the outcome of a call, or "" if it was not made.
func (p provider) find(key string) (outcome string, err error) {
	_, err = os.Stat(p.path(key))
	if os.IsNotExist(err) {
		return "", nil
	}
	return key + " is done", err
}
