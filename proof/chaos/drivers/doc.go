// Package drivers contains only tests, in a package for each driver that the root module does
// not depend on; two drivers may register under the same name.
package drivers
