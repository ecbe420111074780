package main

import (
	"bufio"
	"crypto/sha256"
	"errors"
	"fmt"
	"io/fs"
	"os"
	"path/filepath"

	"aead.dev/minisign"
	"golang.org/x/term"
)

// publicKey is the file in the repository by which users check a release.
const publicKey = "release.pub"

// readKey reads the secret key of whoever releases, and asks for its password.
func readKey(name string) (key minisign.PrivateKey, err error) {
	text, err := os.ReadFile(name)
	if errors.Is(err, fs.ErrNotExist) {
		return key, fmt.Errorf("no key to sign with: %w; give its path as KEY, or see Releases in CONTRIBUTING.md", err)
	}
	if err != nil {
		return key, err
	}
	if !minisign.IsEncrypted(text) {
		err = key.UnmarshalText(text)
		return key, err
	}
	fmt.Fprintf(os.Stderr, "Password of %s: ", name)
	var password []byte
	if stdin := int(os.Stdin.Fd()); term.IsTerminal(stdin) {
		password, err = term.ReadPassword(stdin)
		fmt.Fprintln(os.Stderr)
	} else if lines := bufio.NewScanner(os.Stdin); lines.Scan() {
		password = lines.Bytes()
	} else {
		err = errors.Join(lines.Err(), errors.New("no password"))
	}
	if err != nil {
		return key, err
	}
	return minisign.DecryptKey(string(password), text)
}

// checkKey fails unless users who have the repository can check what this key signs.
func checkKey(top string, key minisign.PrivateKey) error {
	public, err := minisign.PublicKeyFromFile(filepath.Join(top, publicKey))
	if errors.Is(err, fs.ErrNotExist) {
		return fmt.Errorf("there is no %s, by which users check a release; make a key once, with: minisign -G -p %[1]s, and commit that file", publicKey)
	}
	if err != nil {
		return err
	}
	if !public.Equal(key.Public()) {
		return fmt.Errorf("the key to sign with is not the one of %s", publicKey)
	}
	return nil
}

// sign writes the checksums of all files in the directory dist, and their signature.
func sign(dist, version string, key minisign.PrivateKey) error {
	files, err := os.ReadDir(dist) // sorted
	if err != nil {
		return err
	}
	var sums []byte
	for _, file := range files {
		data, err := os.ReadFile(filepath.Join(dist, file.Name()))
		if err != nil {
			return err
		}
		sums = fmt.Appendf(sums, "%x  %s\n", sha256.Sum256(data), file.Name())
	}
	name := filepath.Join(dist, "SHA256SUMS")
	if err := os.WriteFile(name, sums, 0o644); err != nil {
		return err
	}
	// The first comment is signed, too, and minisign prints it.
	signature := minisign.SignWithComments(key, sums, "tenure "+version, "verify with "+publicKey)
	return os.WriteFile(name+".minisig", signature, 0o644)
}
